"""Lists of buckets as people write them, and serving batches with graphs for other batch sizes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from onediff_comfy.buckets import PRESETS, Bucket, BucketError, BucketSet, shown
from onediff_comfy.host.preparation.shape_bucket import choose_size, read_buckets
from onediff_comfy.serving.resolution.batch_plan import BatchPart, cost_of_call, join, plan, split_batch

sides = st.integers(1, 2048).map(lambda side: 8 * side)


@st.composite
def bucket(draw: st.DrawFn) -> Bucket:
    least = draw(st.integers(1, 64))
    return Bucket(
        draw(sides),
        draw(sides),
        least,
        draw(st.integers(least, 64)),
        draw(st.none() | st.integers(1, 1000)),
    )


@st.composite
def bucket_set(draw: st.DrawFn) -> BucketSet:
    kept: list[Bucket] = []
    for one in draw(st.lists(bucket(), min_size=1, max_size=8)):
        if not any(one.overlaps(other) for other in kept):
            kept.append(one)
    return BucketSet(tuple(kept))


# -- reading -----------------------------------------------------------------------------------


@given(bucket_set())
def test_what_is_written_reads_back_as_the_same(buckets: BucketSet) -> None:
    again = BucketSet.parse(str(buckets))
    assert again == buckets
    assert hash(again) == hash(buckets)


@given(bucket_set(), st.data())
def test_case_signs_spaces_comments_and_commas_do_not_matter(buckets: BucketSet, data: st.DataObject) -> None:
    text = ""
    for one in str(buckets).splitlines():
        sign = data.draw(st.sampled_from(["x", "X", "×", " x ", " × ", "*"]))
        end = data.draw(st.sampled_from(["\n", ", ", ",", "\r\n", "  # a comment, 1x1\n", "\n\n", ",\n"]))
        text += data.draw(st.sampled_from([str.upper, str.lower]))(one).replace("X", "x").replace("x", sign) + end
    assert BucketSet.parse(text) == buckets


def test_the_forms_of_the_manual() -> None:
    text = "# mine\n1024x1024 b1\n\n832x1216 b1-4\n 640 x 1536, 832x480 f81 b2 # video\n512×512 B 2 - 3"
    assert BucketSet.parse(text).buckets == (
        Bucket(1024, 1024),
        Bucket(832, 1216, 1, 4),
        Bucket(640, 1536),
        Bucket(832, 480, 2, 2, 81),
        Bucket(512, 512, 2, 3),
    )


ERRORS = {
    "1024": ('"1024" is not a size', "write WIDTHxHEIGHT"),
    "1024x1024 large": ('"1024x1024 large" is not a size', "1024x1024 b1"),
    "1024x1024 b": ("is not a size",),
    "1024x1024 b1-": ("is not a size",),
    "1024x1024 b1 b2": ("is not a size",),
    "832x480 f b1 81": ("is not a size",),
    "1024.5x1024": ("is not a size",),
    "1x1x1": ("is not a size",),
    "1001x1024": ("1001 is not a multiple of 8", "write 1000 or 1008"),
    "1024x4": ("4 is not a multiple of 8", "write 8"),
    "16383x1024": ("16383 is not a multiple of 8", "write 16376 or 16384"),
    "0x1024": ("width must be between 1 and 16384 pixels (got 0)",),
    "1024x-8": ("height must be between 1 and 16384 pixels (got -8)",),
    "1024x16392": ("(got 16392)",),
    "1024x1024 b0": ("the batch size must be between 1 and 64 (got 0)",),
    "1024x1024 b65": ("(got 65)",),
    "1024x1024 b4-1": ("the batch range 4-1 is backwards", "write b1-4"),
    "832x480 f0": ("the number of frames must be between 1 and 1000 (got 0)",),
    "832x480 f1001": ("(got 1001)",),
    "512x512 b4-9": ("512x512 b4-9 is in the list already, as 512x512 b2-4",),
}


@pytest.mark.parametrize("line", ERRORS)
@pytest.mark.parametrize("before", ["512x512 b2-4\n", "512x512 b2-4\n\n# mine\n640x640\n"])
def test_an_error_names_the_line_and_says_what_to_write(before: str, line: str) -> None:
    with pytest.raises(BucketError) as error:
        BucketSet.parse(f"{before}{line}\n768x768")
    message = str(error.value)
    number = before.count("\n") + 1
    assert message.startswith(f'line {number}, "{line}": ')
    for said in ERRORS[line]:
        assert said in message


@given(st.text())
def test_any_text_is_read_or_refused_with_its_line(text: str) -> None:
    try:
        message, buckets = None, BucketSet.parse(text)
    except BucketError as error:
        message, buckets = str(error), None
    if message is None:
        assert buckets is not None and buckets.buckets
    else:
        assert message.startswith("line ") or "no bucket in the list" in message


@given(st.integers(1, 16384), st.sampled_from([8, 16, 32, 64]))
def test_the_sizes_that_an_error_proposes_are_right_and_next(side: int, multiple_of: int) -> None:
    assume(side % multiple_of)
    with pytest.raises(BucketError) as error:
        BucketSet.parse(f"{side}x{multiple_of}", multiple_of)
    proposed = [int(word) for word in str(error.value).split("write ")[1].split(" or ")]
    assert proposed
    for near in proposed:
        assert abs(near - side) < multiple_of
        BucketSet.parse(f"{near}x{multiple_of * 2}", multiple_of)


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing", " , ,"])
def test_an_empty_list_is_refused(text: str) -> None:
    with pytest.raises(BucketError, match="there is no bucket in the list; write one per line, such as 1024x1024 b1"):
        BucketSet.parse(text)


def test_one_size_may_have_several_ranges_of_batches_and_frames() -> None:
    text = "512x512 b3\n512x512 b1-2\n512x512 b4\n512x512 b1 f81"
    assert str(BucketSet.parse(text)) == text


FACTORS = {"SD1.5": 8, "SDXL": 8, "Flux": 16, "Video (Wan)": 16, "Video (LTX)": 32}


def test_every_preset_suits_its_family() -> None:
    assert set(FACTORS) == set(PRESETS)
    for name, multiple_of in FACTORS.items():
        assert read_buckets(name, "", multiple_of) == BucketSet.parse(PRESETS[name])
    for one in read_buckets("SDXL", "", 64).buckets:
        assert abs(one.width * one.height - 2**20) < 0.07 * 2**20
    for one in read_buckets("Video (Wan)", "", 16).buckets:
        assert one.frames is not None and one.frames % 4 == 1
    for one in read_buckets("Video (LTX)", "", 32).buckets:
        assert one.frames is not None and one.frames % 8 == 1


def test_a_preset_that_does_not_suit_the_model_is_named() -> None:
    with pytest.raises(BucketError, match=r"the preset Video \(Wan\) does not suit this model: line 3"):
        read_buckets("Video (Wan)", "", 32)
    with pytest.raises(BucketError, match=r'no preset "SDXXL"; choose custom or one of SD1\.5, SDXL'):
        read_buckets("SDXXL", "", 8)


# -- choosing ----------------------------------------------------------------------------------

wishes = st.tuples(st.integers(1, 16384), st.integers(1, 16384), st.integers(1, 4096))


@given(bucket_set(), wishes)
def test_snapping_gives_a_member_and_then_stays(buckets: BucketSet, wish: tuple[int, int, int]) -> None:
    chosen, batch = buckets.snap(*wish)
    assert chosen in buckets.buckets
    assert batch in chosen.batches
    assert buckets.holds(chosen.width, chosen.height, batch, chosen.frames)
    again, same = buckets.snap(chosen.width, chosen.height, batch)
    assert (again.width, again.height, same) == (chosen.width, chosen.height, batch)


@given(bucket_set(), wishes)
def test_no_bucket_is_nearer_in_shape_nor_of_that_shape_in_area(buckets: BucketSet, wish: tuple[int, int, int]) -> None:
    width, height, batch = wish
    chosen, _ = buckets.snap(width, height, batch)

    def far(one: Bucket) -> tuple[float, float]:
        shape = abs(math.log(one.width / one.height) - math.log(width / height))
        area = abs(math.log(one.width * one.height) - math.log(width * height))
        return shape, area

    for other in buckets.buckets:
        assert far(chosen)[0] <= far(other)[0] + 1e-9
        if abs(far(chosen)[0] - far(other)[0]) < 1e-12:
            assert far(chosen)[1] <= far(other)[1] + 1e-9


def test_snapping_goes_by_shape_then_area_then_batch_then_order() -> None:
    buckets = BucketSet.parse("512x512\n1024x1024 b1\n1024x1024 b4-6\n832x1216 b1-2\n832x1216 b1-2 f9")
    assert buckets.snap(1000, 1010, 1) == (buckets.buckets[1], 1)
    assert buckets.snap(600, 600, 1) == (buckets.buckets[0], 1)
    assert buckets.snap(1024, 1024, 5) == (buckets.buckets[2], 5)
    assert buckets.snap(1024, 1024, 9) == (buckets.buckets[2], 6)
    assert buckets.snap(1024, 1024, 2) == (buckets.buckets[1], 1)
    assert buckets.snap(700, 1000, 2) == (buckets.buckets[3], 2)
    # As far from 2:1 as from 1:2, whichever way it is computed: the first of the list.
    assert BucketSet.parse("608x304, 304x608").snap(96, 96, 1)[0].width == 608
    assert BucketSet.parse("304x608, 608x304").snap(96, 96, 1)[0].width == 304


@given(bucket_set(), wishes, st.none() | st.integers(1, 1000))
def test_holds_is_membership(buckets: BucketSet, wish: tuple[int, int, int], frames: int | None) -> None:
    one = buckets.buckets[0]
    for width, height, batch in (wish, (one.width, one.height, wish[2]), (one.width, one.height, one.most_batch)):
        expected = any(
            single.width == width and single.height == height and (frames is None or single.frames == frames)
            for bucket in buckets.buckets
            for single in map(bucket.at, bucket.batches)
            if single.least_batch == batch
        )
        assert buckets.holds(width, height, batch, frames) == expected


def test_the_choice_is_said() -> None:
    buckets = BucketSet.parse("1024x1024 b1-4\n832x480 f81")
    assert choose_size(buckets, 1000, 1010, 1, True, 8) == (1024, 1024, 1, "1000×1010 → 1024×1024 b1")
    assert choose_size(buckets, 1024, 1024, 8, True, 8) == (1024, 1024, 4, "1024×1024 b8 → 1024×1024 b4")
    assert choose_size(buckets, 1024, 1024, 2, True, 8) == (1024, 1024, 2, "1024×1024 b2")
    assert choose_size(buckets, 830, 480, 1, True, 8) == (832, 480, 1, "830×480 → 832×480 b1 f81")
    assert choose_size(buckets, 1024, 1024, 2, False, 8) == (1024, 1024, 2, "1024×1024 b2")
    *size, text = choose_size(buckets, 1000, 1010, 5, False, 8)
    assert size == [1000, 1010, 5]
    assert text.splitlines() == [
        "1000×1010 b5 is in no bucket; it runs on the general graph",
        "1010: not a multiple of 8, which the model needs; it is padded or cut",
    ]
    assert shown(Bucket(832, 480, 1, 4, 81)) == "832×480 b1-4 f81"


# -- batches -----------------------------------------------------------------------------------

size_sets = st.sets(st.integers(1, 16), min_size=1, max_size=5)


def cost(parts: list[BatchPart]) -> float:
    return sum(cost_of_call(part.size) for part in parts)


def test_batches_are_split_and_padded_where_that_is_cheapest() -> None:
    assert plan(3, {4}) == [BatchPart(0, 3, 4)]
    assert plan(6, [2, 4]) == [BatchPart(0, 4, 4), BatchPart(4, 2, 2)]
    assert plan(7, {4, 2}) == [BatchPart(0, 4, 4), BatchPart(4, 3, 4)]  # 8.5, as 4 + 2 + 2 is 8.75
    assert plan(3, {1, 2, 4}) == [BatchPart(0, 2, 2), BatchPart(2, 1, 1)]  # 3.5, as padding to 4 is 4.25
    assert plan(7, {1, 8}) == [BatchPart(0, 7, 8)]  # 8.25, as seven calls are 8.75
    assert plan(4, {1, 2, 4}) == [BatchPart(0, 4, 4)]
    assert plan(5, {2}, cost=lambda size: 1.0) == [BatchPart(0, 2, 2), BatchPart(2, 2, 2), BatchPart(4, 1, 2)]
    assert plan(3, {1, 4}, cost=lambda size: size) == [BatchPart(0, 1, 1), BatchPart(1, 1, 1), BatchPart(2, 1, 1)]


@given(st.integers(1, 40), size_sets)
def test_a_plan_covers_every_sample_once_and_only_its_last_part_is_filled_up(batch: int, sizes: set[int]) -> None:
    parts = plan(batch, sizes)
    assert [index for part in parts for index in range(part.start, part.start + part.taken)] == list(range(batch))
    assert all(part.size in sizes and 1 <= part.taken <= part.size for part in parts)
    assert all(part.taken == part.size for part in parts[:-1])
    if batch in sizes:
        assert parts == [BatchPart(0, batch, batch)]


def cheapest(batch: int, sizes: set[int]) -> float:
    """By trying every combination, largest sizes first."""
    if batch <= 0:
        return 0.0
    return min(cost_of_call(size) + cheapest(batch - size, {s for s in sizes if s <= size}) for size in sizes)


@given(st.integers(1, 12), st.sets(st.integers(1, 16), min_size=1, max_size=4))
def test_no_other_plan_is_cheaper(batch: int, sizes: set[int]) -> None:
    assert cost(plan(batch, sizes)) == cheapest(batch, sizes)
    for size in sizes:
        one_call_or_repeated = math.ceil(batch / size) * cost_of_call(size)
        assert cost(plan(batch, sizes)) <= one_call_or_repeated


@given(st.integers(1, 24), size_sets, st.integers(0, 2**31))
def test_recombined_output_equals_the_whole_and_padding_never_leaks(batch: int, sizes: set[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    latent = torch.randn(batch, 4, 3, 2, generator=generator)
    steps = torch.arange(float(batch))
    parts = plan(batch, sizes)

    def model(latent: torch.Tensor, steps: torch.Tensor) -> list[torch.Tensor]:
        """Each sample's result depends on all of its own values and on nothing else."""
        return [latent * steps[:, None, None, None] + latent.flip(1), latent.flatten(1).amax(1)]

    calls = split_batch([latent, steps], batch, parts)
    for part, (part_latent, part_steps) in zip(parts, calls, strict=True):
        assert part_latent.shape[0] == part_steps.shape[0] == part.size
    outputs = [model(*call) for call in calls]
    for part, tensors in zip(parts, outputs, strict=True):
        for tensor in tensors:
            tensor[part.taken :] = math.nan  # what fills a part up is poison from here on
    whole = model(latent, steps)
    for joined, expected in zip(join(outputs, parts), whole, strict=True):
        assert torch.equal(joined, expected)


def test_what_fills_a_part_up_is_its_last_sample() -> None:
    ((part,),) = split_batch([torch.tensor([[1.0], [2.0], [3.0]])], 3, plan(3, {5}))
    assert part.flatten().tolist() == [1, 2, 3, 3, 3]


def test_impossible_plans_and_tensors_are_refused() -> None:
    for batch, sizes in ((0, [1]), (1, []), (1, [0, 1])):
        with pytest.raises(ValueError, match=f"no plan for a batch of {batch}"):
            plan(batch, sizes)
    parts = plan(3, {2})
    with pytest.raises(ValueError, match=r"a tensor of shape \[4, 2\] has no batch of 3"):
        split_batch([torch.zeros(3, 2), torch.zeros(4, 2)], 3, parts)
    with pytest.raises(ValueError, match=r"a tensor of shape \[\] has no batch"):
        split_batch([torch.tensor(1.0)], 3, parts)
    with pytest.raises(ValueError, match=r"an output of shape \[1\] is not of a batch of 2"):
        join([[torch.zeros(2)], [torch.zeros(1)]], parts)
