"""A tiny chat model and data sets on which ms-swift and TRL train on CPUs in seconds.

It runs with the Python of a trainer's environment, so it imports nothing from this project: ``<environment>/bin/python
tests/worker/command/tiny_model.py FOLDER``.
"""

import json
import random
import sys
from pathlib import Path

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MODEL = "Qwen3-0.6B"
"""Folder of the model. ms-swift tells models of the same architecture apart by this name."""
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>")
REWARD = '''"""Reward of the tests: share of digits in a completion, for TRL and, as a plug-in, for ms-swift."""


def digits(completions, **columns):
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [sum(one.isdigit() for one in text) / max(len(text), 1) for text in texts]


try:
    from swift.rewards import ORM, orms
except ImportError:
    pass
else:

    class Digits(ORM):
        def __call__(self, completions, **kwargs):
            return digits(completions)

    orms["digits"] = Digits
'''


def write_all(folder: Path) -> None:
    """Write the model, the data sets and the rewards.

    These are ``Qwen3-0.6B/``, ``swift_grpo.jsonl``, ``swift_pairs.jsonl``, ``trl_grpo.jsonl``, ``trl_pairs.jsonl`` and
    ``rewards.py``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / MODEL)
    draw = random.Random(0)
    files: dict[str, list[dict[str, object]]] = {"swift_grpo": [], "swift_pairs": [], "trl_grpo": [], "trl_pairs": []}
    for _ in range(256):
        digits = "".join(draw.choices("0123456789", k=draw.randint(3, 9)))
        asked = [{"role": "user", "content": f"sort {digits}"}]
        right, wrong = "".join(sorted(digits)), digits[::-1]
        files["swift_grpo"].append({"messages": asked, "solution": right})
        files["trl_grpo"].append({"prompt": asked, "solution": right})
        answered = [{"role": "assistant", "content": right}]
        files["swift_pairs"].append({"messages": asked + answered, "rejected_response": wrong})
        rejected = [{"role": "assistant", "content": wrong}]
        files["trl_pairs"].append({"prompt": asked, "chosen": answered, "rejected": rejected})
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARD)


def write_model(folder: Path) -> None:
    """Write a Qwen3 of 0.6 million random weights with a tokenizer of one token per character."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    characters = [*map(chr, range(32, 127)), "\n"]
    tokens = Tokenizer(
        models.WordLevel({token: at for at, token in enumerate((*SPECIAL_TOKENS, *characters))}, unk_token="<unk>")
    )
    tokens.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokens.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        unk_token="<unk>",
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
