"""What other threads, and collections on this one, do to recordings in the middle of something. No GPU is needed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

from onediff_comfy.capture.export import Binding
from onediff_comfy.capture.shape_range import ShapeRange
from onediff_comfy.engines.base import CompiledGraph
from onediff_comfy.runtime.cuda_graphs import RecordedGraph
from onediff_comfy.runtime.recording_pool import RecordingPool

SIZES = ((4,),)


class Graph(CompiledGraph):
    def __init__(self) -> None:
        super().__init__(Binding((), {}, pytree.tree_structure([0])), ShapeRange(((4,),), {}))

    def __call__(self, _weights: Any, tensors: Any) -> Any:
        return [tensors[0]]


class OnAGpu:
    """A tensor, as far as one is looked at before a replay."""

    shape, device = (4,), torch.device("cuda:0")


class Recording:
    """Another thing happens where something of it is looked at for the first time."""

    def __init__(self, happens: Any = lambda: None) -> None:
        self._happens = [happens]

    @property
    def replays(self) -> int:
        self._look()
        return 0

    @property
    def addresses(self) -> list[int]:
        self._look()
        return [1]

    def _look(self) -> None:
        if self._happens:
            self._happens.pop()()

    def replay(self, _tensors: Any, _confirmed: Any, _into: Any) -> list[str]:
        return ["replayed"]


@pytest.fixture
def pool() -> RecordingPool:
    return RecordingPool(lambda: 1 << 40)


def recorded(pool: RecordingPool, *recordings: Recording) -> RecordedGraph:
    graph = RecordedGraph(Graph(), pool, lambda: None)
    for number, recording in enumerate(recordings):
        graph.by_name[((4 + number,),), ()] = recording  # type: ignore[assignment]
    return graph


def test_a_model_that_dies_while_its_recording_is_looked_up_ends_no_call(pool: RecordingPool) -> None:
    graph = recorded(pool, Recording(lambda: pool.release()))
    outputs: Any = graph.run([], [1], [OnAGpu()])  # type: ignore[list-item]
    assert outputs == ["replayed"]


def test_a_model_that_dies_while_recordings_are_thrown_away_ends_nothing(pool: RecordingPool) -> None:
    graph = recorded(pool, Recording(lambda: pool.release()), Recording())
    pool.release()
    assert graph.recordings == 0


def test_a_graph_that_is_loaded_meanwhile_waits_for_the_release(pool: RecordingPool) -> None:
    loading, in_the_middle = list[threading.Thread](), list[bool]()

    class Recorder:
        def forget_recordings(self) -> None:
            thread = threading.Thread(target=lambda: RecordedGraph(Graph(), pool, lambda: None), daemon=True)
            loading.append(thread)
            thread.start()
            thread.join(0.2)
            in_the_middle.append(not thread.is_alive())

        def reconsider(self) -> None:
            self.forget_recordings()

    recorders = [Recorder() for _ in range(2)]
    for recorder in recorders:
        pool.join(recorder)
    for change in (pool.release, pool.budget_changed):
        change()
        for thread in loading:
            thread.join(20)
    assert in_the_middle == [False] * 4
