"""What a manifest may consist of: types, and limits far beyond what any model needs.

Imported only when a manifest is read, for pydantic comes with ComfyUI and not with this pack.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from .artifact import LONGEST_OPTION, MOST_OPTIONS, is_part_name


def _part_name(name: str) -> str:
    if not is_part_name(name):
        raise ValueError("no part has such a name")
    return name


Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
EngineName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{1,64}$")]
PartName = Annotated[str, AfterValidator(_part_name)]
Text = Annotated[str, StringConstraints(max_length=2_000)]
LongText = Annotated[str, StringConstraints(max_length=2_000_000)]
Size = Annotated[int, Field(ge=0, le=1 << 40)]
Signed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Pair = Field(min_length=2, max_length=2)
_MANY = 50_000


class _Strict(BaseModel, frozen=True):
    """Nothing is converted. What a later version added is passed over: what changes a meaning raises the format."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class _Part(_Strict, frozen=True):
    model_config = ConfigDict(extra="forbid")

    size: Size
    sha256: Digest


class _Shapes(_Strict, frozen=True):
    axes: Annotated[
        list[Annotated[list[Signed | Annotated[list[Signed | Text], Pair]], Field(max_length=64)]],
        Field(max_length=_MANY),
    ]
    limits: Annotated[dict[Text, Annotated[list[Signed | None], Pair]], Field(max_length=1_000)]
    conditions: Annotated[list[Annotated[str, StringConstraints(max_length=20_000)]], Field(max_length=10_000)]
    batch: Text | None = None


class _Brief(_Strict, frozen=True):
    inputs: Annotated[list[Annotated[list[Text | Signed], Field(min_length=3, max_length=3)]], Field(max_length=_MANY)]
    output: LongText
    folds: Annotated[list[Annotated[list[Signed], Pair]], Field(max_length=_MANY)]
    waits: bool = False
    calls_option: bool = False


class _Binding(_Brief, frozen=True):
    brief: _Brief | None = None


class _Manifest(_Strict, frozen=True):
    key: Digest
    capture: Text
    target: Text
    engine: EngineName
    options: Annotated[dict[Text, Text], Field(max_length=1_000)]
    environment: Annotated[dict[Text, Text], Field(max_length=1_000)]
    signature: Annotated[list[LongText], Field(max_length=_MANY)]
    shapes: _Shapes
    binding: _Binding
    calls: Annotated[list[Digest], Field(max_length=_MANY)]
    options_read: Annotated[
        dict[
            Digest,
            Annotated[
                list[Annotated[str, StringConstraints(max_length=LONGEST_OPTION)]], Field(max_length=MOST_OPTIONS)
            ],
        ],
        Field(max_length=_MANY),
    ]
    parts: Annotated[dict[PartName, _Part], Field(max_length=_MANY)]
    compile_seconds: Annotated[float, Field(ge=0, le=1e9)]
    created: Annotated[str, StringConstraints(max_length=64)]
    format: Literal[2]


def check(fields: Any) -> None:
    """Refuse fields of a manifest that are not what they should be.

    Raises:
        ValueError: names the field.
    """
    try:
        _Manifest.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        named = [str(place) for place in first["loc"][:1] if place in _Manifest.model_fields]
        raise ValueError(f"{named[0] if named else 'a field'}: {first['msg']}") from None
