"""What there is one of in a process."""

from __future__ import annotations

import threading

from onediff_comfy.once import once


def test_whichever_threads_ask_first_are_given_the_same() -> None:
    begun, go = threading.Event(), threading.Event()
    made, found = list[object](), list[object]()

    @once
    def library() -> object:
        made.append(object())
        begun.set()
        assert go.wait(20)
        return made[-1]

    threads = [threading.Thread(target=lambda: found.append(library())) for _ in range(2)]
    threads[0].start()
    assert begun.wait(20)
    threads[1].start()
    threads[1].join(0.2)  # it may come too late to be in the way; then this shows nothing, and is no failure
    go.set()
    for thread in threads:
        thread.join(20)
    assert len(made) == 1 and found == made * 2
    assert library() is made[0]
