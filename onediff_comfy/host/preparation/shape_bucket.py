"""Read a person's list of buckets for a MODEL, and choose one of them."""

from __future__ import annotations

from ...buckets import PRESETS, BucketError, BucketSet, shown
from ...messages import joined, message

FACTOR = 8
"""Pixels per latent pixel of the common models, for sizes that are checked without a model."""

CUSTOM = "custom"
"""The choice beside the presets: the person's own list."""


def read_buckets(preset: str, text: str, multiple_of: int) -> BucketSet:
    """Return the buckets of a preset, or of the text if the choice is custom.

    Args:
        preset: a name in ``PRESETS``, or ``CUSTOM``.
        text: see ``BucketSet.parse``.
        multiple_of: pixels.

    Raises:
        BucketError: there is no such preset, or a line of the list cannot be.
    """
    if preset != CUSTOM and preset not in PRESETS:
        raise BucketError(
            message(
                'there is no preset "{preset}"; choose {custom} or one of {names}',
                preset=preset,
                custom=CUSTOM,
                names=", ".join(PRESETS),
            )
        )
    if preset == CUSTOM:
        return BucketSet.parse(text, multiple_of)
    try:
        return BucketSet.parse(PRESETS[preset], multiple_of)
    except BucketError as error:
        raise BucketError(
            message(
                "the preset {preset} does not suit this model: {error}. Choose another preset, or {custom}",
                preset=preset,
                error=error,
                custom=CUSTOM,
            )
        ) from error


def choose_size(
    buckets: BucketSet, width: int, height: int, batch: int, snap: bool, multiple_of: int
) -> tuple[int, int, int, str]:
    """Return the size for the latent node, and which bucket it is, for people.

    Args:
        buckets: to choose from.
        width: wished for, in pixels.
        height: likewise.
        batch: wished for.
        snap: whether to go to the nearest bucket.
        multiple_of: pixels; other sizes are named.
    """
    wished = f"{width}×{height}"
    if snap:
        bucket, size = buckets.snap(width, height, batch)
        chosen = shown(bucket.at(size))
        if (bucket.width, bucket.height) == (width, height) and size == batch:
            return width, height, batch, chosen
        asked = wished if size == batch else f"{wished} b{batch}"
        return bucket.width, bucket.height, size, f"{asked} → {chosen}"
    if buckets.holds(width, height, batch):
        return width, height, batch, f"{wished} b{batch}"
    lines = [message("{size} is in no bucket; it runs on the general graph", size=f"{wished} b{batch}")]
    cut: list[str] = [str(side) for side in dict.fromkeys((width, height)) if side % multiple_of]
    if cut:
        sides = message("{first} and {second}", first=cut[0], second=cut[1]) if len(cut) == 2 else cut[0]
        lines.append(
            message(
                "{sides}: not a multiple of {multiple_of}, which the model needs; it is padded or cut",
                sides=sides,
                multiple_of=multiple_of,
            )
        )
    return width, height, batch, joined("\n", lines)
