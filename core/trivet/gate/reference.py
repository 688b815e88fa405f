"""What transformers says of a sequence: one forward over all of it, the tokens given."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from trivet.dtypes import as_torch
from trivet.gate.session import ALTERNATIVES
from trivet.gate.tensors import build_over, copied_bytes, import_transformers, runtime_views
from trivet.gate.widened import widened

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from trivet.runtime.runtime import Runtime

WIDER = {"bfloat16": torch.float32, "float16": torch.float32, "float32": torch.float64}
"""The dtype that the floor of another is measured against."""


@frozen(eq=False)
class Told:
    """What the reference says of the new tokens of a sequence.

    Attributes:
        chosen: ``[positions]``, log-probability of each token.
        best: ``[positions]``, of the token that the reference would have taken.
        top_ids, top: ``[positions, alternatives]``, the most probable tokens and their log-probabilities.
    """

    chosen: NDArray[np.float64]
    best: NDArray[np.float64]
    top_ids: NDArray[np.int64]
    top: NDArray[np.float64]

    @classmethod
    def of(cls, logprobs: torch.Tensor, tokens: Sequence[int]) -> Told:
        """From log-probabilities ``[positions, vocabulary]`` of `tokens`."""
        top, ids = logprobs.topk(min(ALTERNATIVES, logprobs.shape[-1]), dim=-1)
        targets = torch.tensor(tokens, device=logprobs.device).unsqueeze(-1)
        chosen = logprobs.gather(-1, targets).squeeze(-1)
        floats = [part.double().cpu().numpy() for part in (chosen, top[:, 0], top)]
        return cls(floats[0], floats[1], ids.cpu().numpy(), floats[2])


class Reference:
    """A transformers model.

    Args:
        model: of transformers, in evaluation.
        source: where its parameters come from, for people.
        dtype: what is served.
    """

    def __init__(self, model: Any, source: str, dtype: str) -> None:
        self._model = model
        self.source = source
        self._wider = WIDER[dtype]

    @classmethod
    def over_tensors(cls, runtime: Runtime) -> Reference:
        """Over the parameters of `runtime`."""
        blueprint = runtime._engine.blueprint
        views = runtime_views(runtime)
        model = build_over(blueprint.directory, views, as_torch(blueprint.capacity.dtype))
        own = copied_bytes(model, views)
        return cls(model, f"the runtime's tensors ({own} bytes copied)", blueprint.capacity.dtype)

    @classmethod
    def over_files(cls, runtime: Runtime) -> Reference:
        """Over the files of the checkpoint that `runtime` serves, read by transformers."""
        blueprint = runtime._engine.blueprint
        model = import_transformers().AutoModelForCausalLM.from_pretrained(
            blueprint.directory, dtype=as_torch(blueprint.capacity.dtype), attn_implementation="sdpa"
        )
        device = runtime._engine.inputs["token_ids"].device
        source = "the checkpoint's files, read by transformers"
        return cls(model.to(device).eval(), source, blueprint.capacity.dtype)

    @property
    def name(self) -> str:
        """Its class."""
        return type(self._model).__name__

    @torch.inference_mode()
    def logprobs(self, prompt: Sequence[int], tokens: Sequence[int], *, wide: bool = False) -> torch.Tensor:
        """``[tokens, vocabulary]``: log-probabilities before each of `tokens`, at least float32.

        Args:
            wide: compute in the next wider dtype, whose distance from the served one is the floor.
        """
        ids = torch.tensor([[*prompt, *tokens[:-1]]], device=next(self._model.parameters()).device)
        with widened(self._model, self._wider) if wide else nullcontext():
            logits = self._model(input_ids=ids, use_cache=False, logits_to_keep=len(tokens)).logits[0]
        return torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)

    def tell(self, prompt: Sequence[int], tokens: Sequence[int]) -> Told:
        """What it says of `tokens` behind `prompt`."""
        return Told.of(self.logprobs(prompt, tokens), tokens)
