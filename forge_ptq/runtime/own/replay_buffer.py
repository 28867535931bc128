"""`ReplayBuffer`: keeps episodes until they are sampled or too old."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from monarch.actor import endpoint

from forge_ptq.runtime.own.actor import ForgeActor
from forge_ptq.runtime.own.metrics import Reduce, record_metric

SEED_LIMIT = 2**32


@dataclass
class Entry:
    """An episode and how often it was sampled."""

    episode: Any
    sample_count: int = 0


def same(batch: Sequence[Any]) -> Sequence[Any]:
    """The default collate function."""
    return batch


def _check(key: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"replay_buffer.{key} = {value!r}: expected int >= {least}")


class ReplayBuffer(ForgeActor):
    """In memory, oldest out first when full.

    `sample(v)` first drops what is older than `max_policy_age` versions or was sampled more than
    `max_resample_count` times, then draws `dp_size * batch_size` episodes without replacement and
    returns `collate(...)` of them as `dp_size` lists of `batch_size`; None while there are too few.
    Episodes need an attribute `policy_version`. The draws are a function of `seed` and of the
    order of calls.
    """

    def __init__(
        self,
        batch_size: int,
        dp_size: int = 1,
        max_policy_age: int | None = None,
        max_buffer_size: int | None = None,
        max_resample_count: int | None = 0,
        seed: int | None = None,
        collate: Callable[[Any], Any] = same,
    ) -> None:
        _check("batch_size", batch_size, 1)
        _check("dp_size", dp_size, 1)
        for key, value in (
            ("max_policy_age", max_policy_age),
            ("max_resample_count", max_resample_count),
            ("seed", seed),
        ):
            if value is not None:
                _check(key, value, 0)
        total = batch_size * dp_size
        if max_buffer_size is not None:
            _check("max_buffer_size", max_buffer_size, total)
        if not callable(collate):
            raise ValueError(f"replay_buffer.collate = {collate!r}: expected a callable")
        self.batch_size = batch_size
        self.dp_size = dp_size
        self.max_policy_age = max_policy_age
        self.max_buffer_size = max_buffer_size
        self.max_resample_count = max_resample_count
        self.seed = random.randrange(SEED_LIMIT) if seed is None else seed
        self.collate = collate
        self.entries: list[Entry] = []
        self._random = random.Random(self.seed)

    @endpoint
    async def add(self, episode: Any) -> None:
        """Takes in one episode; the oldest one goes if the buffer is full."""
        self.entries.append(Entry(episode))
        if self.max_buffer_size is not None:
            del self.entries[: -self.max_buffer_size]
        record_metric("buffer/add/count_episodes_added", 1, Reduce.SUM)

    @endpoint
    async def sample(self, curr_policy_version: int) -> Any:
        """`collate` of dp_size lists of batch_size episodes, or None if there are too few."""
        record_metric("buffer/sample/count_sample_requests", 1, Reduce.SUM)
        self._evict(curr_policy_version)
        total = self.batch_size * self.dp_size
        if self.max_buffer_size is not None:
            utilization = len(self.entries) / self.max_buffer_size
            record_metric("buffer/sample/avg_buffer_utilization", utilization, Reduce.MEAN)
        if len(self.entries) < total:
            return None
        record_metric("buffer/sample/avg_data_utilization", total / len(self.entries), Reduce.MEAN)
        drawn = self._random.sample(self.entries, total)
        for entry in drawn:
            entry.sample_count += 1
            age = curr_policy_version - entry.episode.policy_version
            record_metric("buffer/sample/avg_sampled_policy_age", age, Reduce.MEAN)
            record_metric("buffer/sample/max_sampled_policy_age", age, Reduce.MAX)
            record_metric("buffer/sample/min_sampled_policy_age", age, Reduce.MIN)
        episodes = [entry.episode for entry in drawn]
        size = self.batch_size
        shards = [episodes[rank * size : (rank + 1) * size] for rank in range(self.dp_size)]
        return self.collate(shards)

    def _evict(self, curr_policy_version: int) -> None:
        before = len(self.entries)
        self.entries = [entry for entry in self.entries if self._keeps(entry, curr_policy_version)]
        evicted = before - len(self.entries)
        record_metric("buffer/evict/sum_episodes_evicted", evicted, Reduce.SUM)

    def _keeps(self, entry: Entry, curr_policy_version: int) -> bool:
        age = curr_policy_version - entry.episode.policy_version
        if self.max_policy_age is not None and age > self.max_policy_age:
            return False
        limit = self.max_resample_count
        return limit is None or entry.sample_count <= limit

    @endpoint
    async def evict(self, curr_policy_version: int) -> None:
        """Drops what is too old or was sampled too often; sample() does so by itself."""
        self._evict(curr_policy_version)

    @endpoint
    async def clear(self) -> None:
        """Drops everything."""
        self.entries.clear()

    @endpoint
    async def _numel(self) -> int:
        """Number of episodes held."""
        return len(self.entries)

    @endpoint
    async def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on sampling as if nothing had happened (must be pickled)."""
        return {
            "seed": self.seed,
            "random": self._random.getstate(),
            "entries": [(entry.episode, entry.sample_count) for entry in self.entries],
        }

    @endpoint
    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state_dict()."""
        self.seed = state["seed"]
        self._random.setstate(state["random"])
        self.entries = [Entry(episode, count) for episode, count in state["entries"]]
