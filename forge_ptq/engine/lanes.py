"""A scheduler in which every engine step runs wholly under one weight slot.

A lane is a slot. A request is pinned to one when it is admitted (``extra_args["forge_slot"]``, else
the live slot) and stays on it for life. While both lanes have work the scheduler alternates between
them, so neither starves: live | probe | live | probe, or live | draining | live | draining. With
work in one lane only, the stock scheduler runs untouched, at the cost of one comparison.

For a step of one lane the other lane's requests are set aside (its running list and its waiting
queue) around ``super().schedule()``. A request left out of a step keeps its KV blocks; vLLM's model
runner drops it from the persistent batch and takes it back later, as it does after a preemption
without freeing. Consequences, all intended:

- preemption for lack of KV blocks happens within the lane that runs, newest request first;
- ``max_num_seqs`` limits each lane by itself with the V1 model runner, whose batch holds one
  step's requests; with the V2 runner, whose request states stay, both lanes share the limit and
  one place is kept free for a lane that waits without running;
- ids of finished requests go out with the next step, whichever lane that is;
- while live work waits, a step of the other lane takes at most ``idle_lane_tokens`` tokens beside
  one for each of its running sequences, so that a long probe is cut into chunks instead of
  delaying the live lane. A companion's lane carries live traffic too and has the same limits as
  the live one (``SlotBank.companion``).

Weights are switched when the step is scheduled, in the process that runs it, so steps must not
overlap: async scheduling, pipeline and tensor parallelism are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

SLOT_KEY = "forge_slot"


class LaneScheduler(Scheduler):
    """See the module. ``step_slot`` is the slot of the last scheduled step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        parallel = self.vllm_config.parallel_config
        if self.scheduler_config.async_scheduling or self.vllm_config.max_concurrent_batches > 1:
            raise RuntimeError("lanes: steps must not overlap, set async_scheduling=False")
        if parallel.world_size > 1:
            raise RuntimeError("lanes: tensor and pipeline parallelism must be 1 for now")
        if self.connector is not None or self.lora_config is not None:
            raise RuntimeError("lanes: KV connectors and LoRA are not supported")
        self.bank = self.vllm_config.quant_config.bank  # type: ignore[union-attr]
        self.step_slot: int = self.bank.live
        self.idle_lane_tokens = self.max_num_scheduled_tokens
        self.lane_counts = [0, 0]
        self._slot_of: dict[str, int] = {}
        self._last_contended = 1

    def add_request(self, request: Request) -> None:
        """Admit a request and pin it to its slot."""
        if request.request_id not in self._slot_of:
            params = request.sampling_params
            extra = (params.extra_args if params is not None else None) or {}
            slot = int(extra.get(SLOT_KEY, self.bank.live))
            self._slot_of[request.request_id] = slot
            self.lane_counts[slot] += 1
        super().add_request(request)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        slot = self._slot_of.pop(request.request_id, None)
        if slot is not None:
            self.lane_counts[slot] -= 1
        return super()._free_request(request, delay_free_blocks=delay_free_blocks)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """One step of one lane; its slot becomes the active one."""
        first, second = self.lane_counts
        if first and second:
            slot = 1 - self._last_contended
            self._last_contended = slot
            self._enter(slot)
            return self._schedule_lane(slot, throttle_prefills)
        if first or second:
            self._enter(0 if first else 1)
        return super().schedule(throttle_prefills)

    def _enter(self, slot: int) -> None:
        self.step_slot = slot
        self.bank.activate(slot)

    def _schedule_lane(self, slot: int, throttle_prefills: bool) -> SchedulerOutput:
        def mine(request: Request) -> bool:
            return self._slot_of[request.request_id] == slot

        aside = [request for request in self.running if not mine(request)]
        waiting, waiting_aside = self._split(self.waiting, mine)
        holding, holding_aside = self._split(self.kv_holding_waiting, mine)
        limits = self.max_num_active_reqs, self.max_num_scheduled_tokens
        if aside:
            self.running = [request for request in self.running if mine(request)]
        self.waiting, self.kv_holding_waiting = waiting, holding
        if self.use_v2_model_runner:
            keep = 1 if not aside and waiting_aside else 0
            self.max_num_active_reqs = max(0, self.max_num_active_reqs - len(aside) - keep)
        if slot not in (self.bank.live, self.bank.companion):
            own = self.idle_lane_tokens + len(self.running)
            self.max_num_scheduled_tokens = min(limits[1], own)
        try:
            return super().schedule(throttle_prefills)
        finally:
            self.max_num_active_reqs, self.max_num_scheduled_tokens = limits
            self.running = self.running + aside
            for request in waiting_aside:
                self.waiting.add_request(request)
            for request in holding_aside:
                self.kv_holding_waiting.add_request(request)

    def _split(
        self, queue: RequestQueue, mine: Callable[[Request], bool]
    ) -> tuple[RequestQueue, list[Request]]:
        kept = create_request_queue(self.policy)
        aside: list[Request] = []
        for request in queue:
            if mine(request):
                kept.add_request(request)
            else:
                aside.append(request)
        return kept, aside
