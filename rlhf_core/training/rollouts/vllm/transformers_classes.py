"""Classes of transformers in a process that also runs vLLM.

vLLM computes some models (GPT-NeoX, Phi) with transformers' classes and changes these classes in place. Every other
model of the process, such as the policy beside a colocated engine, would then be constructed and called as vLLM's.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from transformers import PreTrainedModel

_MARK = "vllm_config"
"""Attribute of a model that vLLM has constructed."""


@contextlib.contextmanager
def kept_classes() -> Iterator[None]:
    """Keep transformers' classes as they are for all models but those that vLLM constructs within the block."""
    before = {cls: (cls.__init__, cls.__call__) for cls in _subclasses(PreTrainedModel)}
    yield
    for cls, (construct, call) in before.items():
        if cls.__init__ is not construct:
            cls.__init__, cls.__call__ = construct, _separated(cls.__call__, call)


def _subclasses(parent: type[PreTrainedModel]) -> set[Any]:
    return {parent, *(cls for child in parent.__subclasses__() for cls in _subclasses(child))}


def _separated(vllms: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(self: PreTrainedModel, *arguments: Any, **named: Any) -> Any:
        call = vllms if _MARK in vars(self) else original
        return call(self, *arguments, **named)

    return __call__
