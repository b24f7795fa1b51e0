"""Buckets: the sizes that graphs are made for, as people write them.

# square, then portrait
1024x1024 b1
832x1216 b1-4
832x480 b1 f81
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

from .messages import message

LARGEST_SIDE = 16384
"""Pixels; what ComfyUI's own nodes accept (MAX_RESOLUTION in its nodes.py)."""
LARGEST_BATCH = 64
MOST_FRAMES = 1000

_SIZE = re.compile(r"(-?\d{1,12})\s*[xX×*]\s*(-?\d{1,12})")
_BATCHES = re.compile(r"[bB]\s*(-?\d{1,12})(?:\s*[-–]\s*(\d{1,12}))?")
_FRAMES = re.compile(r"[fF]\s*(-?\d{1,12})")
_EXAMPLES = message("1024x1024 b1, 832x1216 b1-4, or 832x480 b1 f81 for a video of 81 frames")


class BucketError(ValueError):
    """A bucket, or a list of them, that cannot be. The message says what to write instead."""


@dataclass(frozen=True)
class Bucket:
    """One size in pixels, for some batch sizes.

    Attributes:
        width: in pixels.
        height: in pixels.
        least_batch: the smallest batch size.
        most_batch: the largest batch size, included.
        frames: of a video; None for images.

    Raises:
        BucketError: a number is out of range.
    """

    width: int
    height: int
    least_batch: int = 1
    most_batch: int = 1
    frames: int | None = None

    def __post_init__(self) -> None:
        for name, side in ((message("width"), self.width), (message("height"), self.height)):
            if not 1 <= side <= LARGEST_SIDE:
                raise BucketError(
                    message(
                        "{name} must be between 1 and {largest} pixels (got {side})",
                        name=name,
                        side=side,
                        largest=LARGEST_SIDE,
                    )
                )
        for batch in (self.least_batch, self.most_batch):
            if not 1 <= batch <= LARGEST_BATCH:
                raise BucketError(
                    message(
                        "the batch size must be between 1 and {largest} (got {batch})",
                        batch=batch,
                        largest=LARGEST_BATCH,
                    )
                )
        if self.least_batch > self.most_batch:
            raise BucketError(
                message(
                    "the batch range {least}-{most} is backwards; write b{most}-{least}",
                    least=self.least_batch,
                    most=self.most_batch,
                )
            )
        if self.frames is not None and not 1 <= self.frames <= MOST_FRAMES:
            raise BucketError(
                message(
                    "the number of frames must be between 1 and {most} (got {frames})",
                    frames=self.frames,
                    most=MOST_FRAMES,
                )
            )

    def __str__(self) -> str:
        return f"{self.width}x{self.height} {_batches_and_frames(self)}"

    @property
    def batches(self) -> range:
        """Return the batch sizes, ascending."""
        return range(self.least_batch, self.most_batch + 1)

    def at(self, batch: int) -> Bucket:
        """Return this size for that batch size alone."""
        return Bucket(self.width, self.height, batch, batch, self.frames)

    def overlaps(self, other: Bucket) -> bool:
        """Return True if some size and batch size belongs to both."""
        return (
            (self.width, self.height, self.frames) == (other.width, other.height, other.frames)
            and self.least_batch <= other.most_batch
            and other.least_batch <= self.most_batch
        )


@dataclass(frozen=True)
class BucketSet:
    """Buckets in the order in which they were written.

    ``str()`` gives text that ``parse`` reads back as an equal set.
    """

    buckets: tuple[Bucket, ...]

    @classmethod
    def parse(cls, text: str, multiple_of: int = 8) -> BucketSet:
        """Read buckets, one per line or separated by commas.

        Args:
            text: see the top of this file. A batch size that is not written is 1; ``#`` starts a
                comment; case does not matter, and ``x``, ``×`` and ``*`` mean the same.
            multiple_of: width and height must be multiples of this many pixels.

        Raises:
            BucketError: names the line, and says what to write instead.
        """
        found: list[Bucket] = []
        for number, line in enumerate(text.splitlines(), start=1):
            for part in line.split("#")[0].split(","):
                if not part.strip():
                    continue
                try:
                    found.append(_new_bucket(part.strip(), multiple_of, found))
                except BucketError as error:
                    raise BucketError(
                        message('line {number}, "{line}": {error}', number=number, line=line.strip(), error=error)
                    ) from None
        if not found:
            raise BucketError(
                message("there is no bucket in the list; write one per line, such as {examples}", examples=_EXAMPLES)
            )
        return cls(tuple(found))

    def __str__(self) -> str:
        return "\n".join(map(str, self.buckets))

    def snap(self, width: int, height: int, batch: int) -> tuple[Bucket, int]:
        """Return the nearest bucket, and the batch size in its range that is nearest to ``batch``.

        Nearest is the one whose aspect ratio differs by the smallest factor; among those, whose area
        does; among those, whose batch sizes are nearest; among those, the first of the list.

        Args:
            width: wished for, in pixels.
            height: likewise.
            batch: wished for.
        """

        def distance(bucket: Bucket) -> tuple[Fraction, Fraction, int]:
            return (
                _factor(Fraction(width * bucket.height, height * bucket.width)),
                _factor(Fraction(width * height, bucket.width * bucket.height)),
                abs(batch - _clamped(batch, bucket)),
            )

        nearest = min(self.buckets, key=distance)
        return nearest, _clamped(batch, nearest)

    def holds(self, width: int, height: int, batch: int, frames: int | None = None) -> bool:
        """Return True if some bucket is of exactly this size; ``frames`` None asks for any number of them."""
        return any(
            (bucket.width, bucket.height) == (width, height)
            and batch in bucket.batches
            and frames in (None, bucket.frames)
            for bucket in self.buckets
        )


def shown(bucket: Bucket) -> str:
    """Return a bucket as status texts show it: ``1024×1024 b1``."""
    return f"{bucket.width}×{bucket.height} {_batches_and_frames(bucket)}"


def _batches_and_frames(bucket: Bucket) -> str:
    batches = str(bucket.least_batch) + (f"-{bucket.most_batch}" if bucket.most_batch > bucket.least_batch else "")
    return f"b{batches}" + (f" f{bucket.frames}" if bucket.frames is not None else "")


def _new_bucket(text: str, multiple_of: int, earlier: list[Bucket]) -> Bucket:
    bucket = _bucket(text)
    for side in (bucket.width, bucket.height):
        if side % multiple_of:
            raise BucketError(
                message(
                    "{side} is not a multiple of {multiple_of}; write {near}",
                    side=side,
                    multiple_of=multiple_of,
                    near=near_sizes(side, multiple_of),
                )
            )
    for other in earlier:
        if bucket.overlaps(other):
            raise BucketError(
                message(
                    "{bucket} is in the list already, as {other}; remove one of the two", bucket=bucket, other=other
                )
            )
    return bucket


def _bucket(text: str) -> Bucket:
    size = _SIZE.match(text)
    rest = text[size.end() :] if size else ""
    batches, rest = _take(_BATCHES, rest)
    frames, rest = _take(_FRAMES, rest)
    if size is None or rest.strip(" \t,"):
        raise BucketError(
            message(
                '"{text}" is not a size; write WIDTHxHEIGHT and a batch size, such as {examples}',
                text=text,
                examples=_EXAMPLES,
            )
        )
    least = int(batches[1]) if batches else 1
    most = int(batches[2]) if batches and batches[2] else least
    return Bucket(int(size[1]), int(size[2]), least, most, int(frames[1]) if frames else None)


def _take(pattern: re.Pattern[str], text: str) -> tuple[re.Match[str] | None, str]:
    """Return the first match in ``text``, and the text with a comma, which no text here has, in its place."""
    match = pattern.search(text)
    return match, f"{text[: match.start()]},{text[match.end() :]}" if match else text


def near_sizes(side: int, multiple_of: int) -> str:
    """Return the possible sides in pixels next to ``side`` that are multiples, for people."""
    below = side - side % multiple_of
    near = [str(near) for near in (below, below + multiple_of) if 1 <= near <= LARGEST_SIDE]
    return message("{below} or {above}", below=near[0], above=near[1]) if len(near) == 2 else near[0]


def _clamped(batch: int, bucket: Bucket) -> int:
    return min(max(batch, bucket.least_batch), bucket.most_batch)


def _factor(ratio: Fraction) -> Fraction:
    """Return how far a ratio is from 1 in log space: 2 and 1/2 are equally far. Exact, so that ties are ties."""
    return max(ratio, 1 / ratio)


PRESETS: Mapping[str, str] = MappingProxyType(
    {
        # What the 512×512 model was trained at, and the usual portrait and landscape sizes.
        "SD1.5": "512x512 b1-4\n512x640 b1-4\n640x512 b1-4\n512x768 b1-4\n768x512 b1-4",
        # From the training resolutions in appendix I of the SDXL paper (arXiv 2307.01952), those in use.
        "SDXL": (
            "1024x1024 b1-4\n1152x896 b1-4\n896x1152 b1-4\n1216x832 b1-4\n832x1216 b1-4\n"
            "1344x768 b1-4\n768x1344 b1-4\n1536x640 b1-4\n640x1536 b1-4"
        ),
        # Flux takes 0.1 to 2 megapixels; these are SDXL's sizes and two of 2 megapixels.
        "Flux": (
            "1024x1024 b1-2\n1152x896 b1-2\n896x1152 b1-2\n1216x832 b1-2\n832x1216 b1-2\n"
            "1344x768 b1-2\n768x1344 b1-2\n1408x1408 b1\n1920x1088 b1"
        ),
        # Wan's generate.py: 480p and 720p, 81 frames.
        "Video (Wan)": "832x480 b1 f81\n480x832 b1 f81\n1280x720 b1 f81\n720x1280 b1 f81",
        # Multiples of 32 and 8n+1 frames, as LTX-Video needs; the first is the host's default.
        "Video (LTX)": "768x512 b1 f97\n512x768 b1 f97\n704x480 b1 f97\n480x704 b1 f97\n1216x704 b1 f121",
    }
)
"""Lists for model families by the names that workflows store."""
