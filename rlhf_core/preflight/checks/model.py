"""The model: folder, lengths, and disk space of its checkpoints."""

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rlhf_core.preflight.facts import Facts, ModelFolder
from rlhf_core.preflight.memory.roles import longest_sequence
from rlhf_core.preflight.missing_paths import folder_advice
from rlhf_core.preflight.registry import Finding, blocked, check, passed, skipped, warning
from rlhf_core.preflight.size_estimates import (
    checkpoint_bytes,
    checkpoint_files,
    checkpoints_kept,
    merged_bytes,
    num_positions,
    run_files,
    shape_of_model,
)
from rlhf_core.run_dir.initial_model import moving_rope, num_heads, unshareable_part
from rlhf_core.schemas.model import ALL_LINEAR
from rlhf_core.text.formatting import size


@check("model.folder")
def folder(facts: Facts) -> Iterator[Finding]:
    """A folder without config.json, or with part of the weights, is no model, but only the nodes would find out."""
    found = facts.model_folder
    if found is None:
        return
    if found.problem:
        yield blocked(
            f"model.path = {found.path}: {found.problem}",
            "a folder with config.json and all safetensors weights",
            "correct model.path, or finish the download; on a cluster it must be on a file system that the nodes see",
        )
    elif not facts.spec.makes_reward_model and (other := _not_causal(facts, facts.model_config)):
        yield blocked(
            f"model.path = {found.path}: {other}",
            "a causal language model, which continues a text",
            "set model.path to one, or install a transformers that knows this type as one",
        )
    else:
        yield passed(f"{found.path}: {size(found.weight_bytes)} of weights")


def _not_causal(facts: Facts, config: Mapping[str, Any]) -> str:
    """Type of a model that is no causal language model; empty if it is one, or unknown."""
    kind = config.get("model_type")
    if not facts.causal_types or not kind or kind in facts.causal_types or "auto_map" in config:
        return ""
    of_text = config.get("text_config")
    if isinstance(of_text, Mapping) and of_text.get("model_type") in facts.causal_types:
        return ""
    return f"AutoModelForCausalLM does not load models of the type {kind}"


@check("model.reference", trainer="native")
def reference(facts: Facts) -> Iterator[Finding]:
    """A reference that is missing, or reads other tokens than the policy, ends every rank when it is loaded."""
    for setting, found in facts.references.items():
        yield _reference(facts, setting, found)


def _reference(facts: Facts, setting: str, found: ModelFolder) -> Finding:
    place, config = f"{setting} = {found.path}", found.config
    if found.problem:
        return blocked(
            f"{place}: {found.problem}",
            "a folder with config.json and all safetensors weights",
            folder_advice(setting, str(found.path)),
        )
    if other := _not_causal(facts, config):
        return blocked(f"{place}: {other}", "a causal language model", f"set {setting} to one")
    if config.get("quantization_config"):
        return blocked(
            f"{place}: its weights are quantized",
            "weights in bfloat16, float16 or float32",
            f"save a dequantized copy without quantization_config, and set {setting} to it",
        )
    tokens, needed = config.get("vocab_size"), facts.model_config.get("vocab_size")
    if isinstance(tokens, int) and isinstance(needed, int) and tokens < needed:
        return blocked(
            f"{place} has embeddings for {tokens} tokens, the policy for {needed}",
            "an embedding for every token that the policy may sample",
            f"set {setting} to a model with the tokenizer of the policy",
        )
    tokenizer = facts.content.tokenizer if facts.content is not None else None
    if tokenizer is not None and (difference := tokenizer.references.get(setting)):
        return blocked(
            f"{place}: {difference}",
            "the tokenizer of the policy: the reference judges its tokens",
            f"set {setting} to a model of the same family, or model.tokenizer to its tokenizer",
        )
    heads, shared = num_heads(config), facts.spec.ranks_per_row
    how = f"{heads} attention heads" if heads is not None and heads % shared else unshareable_part(config)
    if shared > 1 and how:
        return blocked(
            f"{place} has {how}, trainer.sequence_parallel = {shared}",
            "a reference whose layers the ranks can share by heads, like those of the policy",
            "set trainer.sequence_parallel=1, or use another reference",
        )
    limit, longest = num_positions(config), longest_sequence(facts.spec)
    if limit is not None and longest > limit:
        return blocked(
            f"{place} has positions for {limit} tokens, the longest sequence has {longest}",
            f"at most {limit} tokens of a prompt with its completion",
            "lower data.max_prompt_tokens or rollout.max_new_tokens",
        )
    return passed(f"{place}: {size(found.weight_bytes)} of weights")


@check("model.config", trainer="native")
def model_config(facts: Facts) -> Iterator[Finding]:
    """A misspelt model type or argument ends every rank when the model is built, after the queue."""
    config, types = facts.spec.model.config, facts.model_types
    if not config or not types.names:
        return
    model_type = str(config["model_type"])
    if model_type not in types.names:
        installed = f"transformers {facts.compute.packages.get('transformers', '')}".rstrip()
        yield blocked(
            f'model.config.model_type = "{model_type}"',
            f"a model type of the installed {installed}{_nearest(model_type, types.names)}",
            "correct model.config.model_type, or install a transformers that has this type",
        )
    for name in sorted(set(config) - types.arguments - {"model_type"} if types.arguments else ()):
        # Only a warning: a model's source may take an argument in a way that is not seen in it.
        yield warning(
            f"model.config.{name}",
            f"an argument of {types.config_class}{_nearest(name, types.arguments)}",
            f"correct model.config.{name}, or remove it",
        )


def _nearest(name: str, known: Collection[str]) -> str:
    found = difflib.get_close_matches(name, sorted(known), n=1)
    return f', for instance "{found[0]}"' if found else ""


@check("model.quantized", trainer="native")
def quantized(facts: Facts) -> Iterator[Finding]:
    """Quantized weights cannot be trained: an optimizer's steps are smaller than the distance between their values."""
    settings = facts.model_config.get("quantization_config")
    if settings:
        kind = settings.get("quant_method", "unknown") if isinstance(settings, Mapping) else "unknown"
        yield blocked(
            f"the weights are quantized: quantization_config of the model's config names the method {kind}",
            "weights in bfloat16, float16 or float32",
            "use the model its authors published without quantization, or save a dequantized copy without "
            "quantization_config, and set model.path to it",
        )


@check("model.dtype", trainer="native")
def dtype(facts: Facts) -> Iterator[Finding]:
    """On GPUs, float32 is the default that is rarely meant: matrix products take many times as long as in bfloat16."""
    if facts.spec.resources.gpus_per_node and facts.spec.model.dtype == "float32":
        yield warning(
            'model.dtype = "float32" on GPUs: matrix products take 3 to 16 times as long as in bfloat16, depending on '
            "the GPU, and attention up to 30 times",
            "bfloat16, with weights in float32 in the optimizer",
            'set model.dtype = "bfloat16", unless the model needs the accuracy or is too small for it to matter',
        )


@check("model.tokenizer", trainer="native")
def tokenizer(facts: Facts) -> Iterator[Finding]:
    """A tokenizer that does not load ends every rank during set-up."""
    if facts.tokenizer_problem:
        model = facts.spec.model
        place = f"model.tokenizer = {model.tokenizer}" if model.tokenizer else f"model.path = {model.path}"
        yield blocked(
            f"{place}: {facts.tokenizer_problem}",
            '"char", "byte", "bpe" or a folder with tokenizer.json or tokenizer_config.json',
            "correct model.tokenizer",
        )


@check("model.length", trainer="native")
def length(facts: Facts) -> Iterator[Finding]:
    """Positions beyond the model's limit fall outside its tables: an illegal access on a GPU, nonsense on a CPU."""
    limit = num_positions(facts.model_config)
    if limit is None:
        return
    spec = facts.spec
    prompt, longest = spec.data.max_prompt_tokens, max(spec.rollout.max_new_tokens, spec.evaluate.max_new_tokens)
    if not (spec.any_loop_samples or spec.completes_held_out(pairs_have_answers=facts.pairs_have_answers)):
        yield passed("nothing is sampled: content.lengths compares the rows themselves with the model's positions")
        return
    section = "rollout" if longest == spec.rollout.max_new_tokens else "evaluate"
    found = (
        f"data.max_prompt_tokens {prompt} + {section}.max_new_tokens {longest} = {spec.max_tokens} tokens, the model "
        f"has positions for {limit}"
    )
    if spec.max_tokens > limit:
        settings = {"data.max_prompt_tokens": limit - longest, f"{section}.max_new_tokens": limit - prompt}
        fits = next((f", for instance {name}={most}" for name, most in settings.items() if most > 0), "")
        yield blocked(
            found,
            f"at most {limit} tokens together",
            f"lower {'one of the two' if fits else 'both'}{fits}",
        )
    else:
        yield passed(found)


@check("model.rotary", trainer="native")
def rotary(facts: Facts) -> Iterator[Finding]:
    """Frequencies that depend on the longest sequence of a pass give tokens other probabilities in training."""
    kind, steady = moving_rope(facts.model_config)
    longest = longest_sequence(facts.spec)
    if kind and longest > steady:
        yield warning(
            f"rotary embeddings of type {kind}, whose frequencies change beyond {steady} tokens, and sequences of up "
            f"to {longest}: the probabilities of a short completion depend on the longest one beside it",
            f"sequences of at most {steady} tokens",
            "lower data.max_prompt_tokens or rollout.max_new_tokens, or use a model with another type, such as yarn",
        )


@check("model.lora", trainer="native")
def lora(facts: Facts) -> Iterator[Finding]:
    """An adapter on layers that the model does not have ends every rank once the model is loaded."""
    adapter = facts.spec.model.lora
    if adapter is None:
        return
    targets = () if adapter.target_modules == (ALL_LINEAR,) else adapter.target_modules
    known = sorted(name for name in _layers(facts) if not _NO_TARGET.search(name))
    unknown = [name for name in targets if name not in known]
    hidden = facts.model_config.get("hidden_size")
    if unknown and known:
        yield blocked(
            f"model.lora.target_modules names {', '.join(unknown)}",
            f"linear layers of the model: {', '.join(known)}",
            f'correct model.lora.target_modules, or set it to ["{ALL_LINEAR}"]',
        )
    elif isinstance(hidden, int) and adapter.rank > hidden:
        yield blocked(
            f"model.lora.rank = {adapter.rank}, but the model has a hidden size of {hidden}",
            "a rank far below the width of the layers, for instance 16",
            "lower model.lora.rank, or remove model.lora to train all weights",
        )
    elif unknown:
        yield skipped(
            "the layers of this model are known only to the trainer, which rejects names without a match when it starts"
        )
    else:
        yield passed(f"rank {adapter.rank} on {', '.join(targets) or 'every linear layer'}")


_NO_TARGET = re.compile(r"embed|^(lm_head|wte|wpe|score)$")
"""Layers without an adapter: embeddings, output layer and heads."""


def _layers(facts: Facts) -> Collection[str]:
    """Names of the model's layers, from its weights or its dimensions; empty if neither is available."""
    if facts.model_folder is not None:
        return facts.model_folder.matrices
    shape = shape_of_model(facts)
    return shape.linear_layers if shape is not None else ()


@check("model.heads", trainer="native")
def heads(facts: Facts) -> Iterator[Finding]:
    """Attention heads that do not divide evenly cause a shape error deep inside the model."""
    config = facts.model_config
    num_heads, num_kv = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(num_heads, int) and isinstance(num_kv, int) and num_kv and num_heads % num_kv:
        yield blocked(
            f"{num_heads} attention heads, {num_kv} key-value heads",
            "a number of attention heads that is a multiple of the key-value heads",
            "correct num_attention_heads or num_key_value_heads in model.config",
        )
    hidden = config.get("hidden_size")
    if not isinstance(hidden, int) or not isinstance(num_heads, int) or not num_heads or config.get("head_dim"):
        return
    if hidden % num_heads:
        yield blocked(
            f"hidden_size {hidden}, {num_heads} attention heads, no head_dim",
            "a hidden_size that is a multiple of num_attention_heads",
            "correct them, or set head_dim in model.config",
        )


@check("disk.writable")
def disk_writable(facts: Facts) -> Iterator[Finding]:
    """A run writes all its files into its directory, which must be writable."""
    if facts.disk.problem:
        yield blocked(
            f"the runs folder, {facts.disk.runs_dir}: {facts.disk.problem}",
            "a writable folder",
            "set RLHF_RUNS (or RLHF_HOME) to another folder",
        )
    else:
        yield passed(f"{facts.disk.runs_dir} is writable")


@check("disk.space")
def disk_space(facts: Facts) -> Iterator[Finding]:
    """A disk that fills up at a checkpoint ends the run."""
    if facts.disk.problem:
        return
    one = checkpoint_bytes(facts)
    if one is None:
        yield skipped("the size of a checkpoint cannot be estimated from this model's config")
        return
    kept, merged, free = checkpoints_kept(facts.spec), merged_bytes(facts), facts.disk.free_bytes
    found = f"{size(free)} free in {facts.disk.runs_dir}, a checkpoint takes about {size(one)} (estimate)"
    found += f", the merged model of a promotion {size(merged)}" if merged else ""
    beside = " and the merged model" if merged else ""
    if free < one + merged:
        expected = f"room for at least one checkpoint{beside}"
        yield blocked(found, expected, "free some space, or set RLHF_RUNS to another file system")
    elif free < (kept + 1) * one + merged:
        yield warning(
            found,
            f"room for {kept} checkpoints kept, one being written{beside}, about {size((kept + 1) * one + merged)}",
            "free some space, lower checkpoint.keep_last, or set RLHF_RUNS to another file system",
        )
    else:
        yield passed(found)


@check("disk.files")
def disk_files(facts: Facts) -> Iterator[Finding]:
    """An exhausted file quota ends the run at a checkpoint with "No space left", although the disk has space."""
    free = facts.disk.free_files
    if facts.disk.problem or free is None:
        return
    one, kept = checkpoint_files(facts), checkpoints_kept(facts.spec)
    found = f"{free} more files can be created in {facts.disk.runs_dir}, a checkpoint takes about {one}"
    needed = (kept + 1) * one + run_files(facts.spec)
    if free < one:
        yield blocked(
            found, f"room for about {needed} files", "remove old runs, or set RLHF_RUNS to another file system"
        )
    elif free < needed:
        yield warning(
            found,
            f"room for about {needed} files: {kept} checkpoints kept, one being written, logs and evidence",
            "remove old runs, lower checkpoint.keep_last, or set RLHF_RUNS to another file system",
        )
    else:
        yield passed(found)
