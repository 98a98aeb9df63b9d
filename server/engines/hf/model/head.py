"""The output layer of a causal language model, computed on the hidden states of a forward that has ended."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch


class HeadOnly:
    """A context manager that keeps the last hidden states of a forward, to compute the output layer on them.

    To compute the output layer, the model's own forward runs once more, with the kept hidden states in place of
    its base model. Scaling and soft caps of the logits are thereby the model's own.

    Args:
        model: the causal language model.
        tokens: number of tokens in the forward that runs inside the context.
    """

    def __init__(self, model: Any, tokens: int) -> None:
        self._model, self._tokens = model, tokens
        self._base: Any = model.base_model
        self._kept: Any = None

    def __enter__(self) -> HeadOnly:
        self._hook = self._base.register_forward_hook(self._keep)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()
        self._kept = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Return the logits [rows, vocabulary] of the tokens with the indices ``rows`` in the forward.

        Returns None if the model's forward does not call its base model as a whole. OPT, for example, calls a
        part of its base model.
        """
        kept = self._kept
        if kept is None:
            return None
        own = vars(self._base).get("forward")
        self._base.forward = lambda *args, **kwargs: kept
        try:
            # The token ids are not used, except that a model may read the shape of this tensor.
            ids = torch.zeros((1, self._tokens), dtype=torch.int64, device=rows.device)
            logits: torch.Tensor = self._model(input_ids=ids, use_cache=False, logits_to_keep=rows).logits[0]
        finally:
            if own is None:
                del self._base.forward
            else:
                self._base.forward = own
        return logits

    def _keep(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        # transformers returns a model without a named base model as its own base model. Its output then has no
        # last hidden states.
        if getattr(output, "last_hidden_state", None) is not None:
            self._kept = output
