"""Write the stored log-probabilities of the shipped families, as transformers computes them.

python -m tests.conformance.store_oracles
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
PACKAGES = {"qwen3": "plugins/qwen3/trivet_qwen3", "qwen3_5": "plugins/qwen35/trivet_qwen35"}


def reference(config: Mapping[str, object], tensors: Mapping[str, torch.Tensor], token_ids: Sequence[int]) -> Any:
    """Logits of transformers' own class, with the language model's config and tensors."""
    import transformers

    text: Any = copy.deepcopy(config.get("text_config", config))  # transformers writes into it
    kinds = {"qwen3": ("Qwen3Config", "Qwen3ForCausalLM"), "qwen3_5_text": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM")}
    config_class, model_class = (getattr(transformers, name) for name in kinds[text["model_type"]])
    model = model_class(config_class(**text)).eval().float()
    state = {re.sub(r"^model\.language_model\.", "model.", name): tensor for name, tensor in tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and all("lm_head" in name or "inv_freq" in name for name in missing), (missing, unexpected)
    assert ("lm_head.weight" in missing) == bool(text["tie_word_embeddings"])
    model.tie_weights()
    with torch.inference_mode():
        return model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]


def main() -> None:
    """Write the file of each shipped family."""
    import transformers

    from trivet.conformance.oracle import store_logprobs

    for model_type, package in PACKAGES.items():
        file = ROOT / package / "oracle.safetensors"
        store_logprobs(model_type, file, reference, f"transformers {transformers.__version__}")
        print(file.relative_to(ROOT), file.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
