"""What the tests put into vLLM: a scheduler that notes every round, a worker that mends a fault of the CPU build."""

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.cpu_worker import CPUWorker

ROUNDS: dict[str, list[tuple[list[int], list[int]]]] = {}
"""Request -> its rounds: the draft tokens that were verified, and the tokens that came out (accepted and one more)."""

_STOCK = DFlashQwen3Model._normalize_context_k


class NotingScheduler(Scheduler):
    """Needs synchronous scheduling: with the other the drafts are not known here."""

    def update_from_output(self, scheduler_output, model_runner_output):
        made = dict(zip(model_runner_output.req_ids, model_runner_output.sampled_token_ids))
        for request, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
            ROUNDS.setdefault(request, []).append((list(drafts), list(made[request])))
        return super().update_from_output(scheduler_output, model_runner_output)


def norm_context_keys(per_layer: bool) -> None:
    """Whether each draft layer's context keys get that layer's k_norm, or, as in the CPU build, all get the first's."""
    DFlashQwen3Model._normalize_context_k = _per_layer if per_layer else _STOCK


def _per_layer(self, keys):
    """keys [layers, tokens, kv heads, head_dim] -> the same shape, RMS-normalised by layer."""
    normed = torch.empty_like(keys)
    for layer, weight in enumerate(self._k_norm_weights):
        ops.rms_norm(normed[layer], keys[layer], weight, self._rms_norm_eps)
    return normed


class Worker(CPUWorker):
    """The CPU worker with every layer's own k_norm, which tells the scheduler what was drafted (runner V2 only says
    how much)."""

    def init_device(self):
        super().init_device()
        norm_context_keys(per_layer=True)
        handler = getattr(self.model_runner, "draft_tokens_handler", None)
        if handler is None:
            return

        def tell(batch, drafts):
            handler.req_ids, handler.num_draft_tokens = batch.req_ids, drafts.shape[1]
            handler.draft_tokens_np = drafts.numpy().copy()

        handler.set_draft_tokens = tell
