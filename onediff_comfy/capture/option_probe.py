"""Find out which options a forward reads, by letting it run without them.

ComfyUI hands every model an open-ended ``transformer_options`` dict. Some entries change the
computation (patches, overrides), others are bookkeeping that differs on every call (ids, noise
levels). Which is which depends on the model, and guessing from names is how accelerators come to
ignore other people's patches. So we do not guess: during a capture each value is replaced by an
``OptionProbe``. Storing it, copying it and passing it on are fine, because none of these
can change a result. Any real use raises ``OptionRead``, which names the entry; the capture then
starts again with that entry's true value, and the value becomes part of the call's signature.

``value is None`` is answered rightly, because a stand-in is never None and an option that *is* None
is not probed. What cannot be seen this way is ``type(value)``, ``callable(value)`` and ``value is
True``; no model of the host does these to an option.
"""

from __future__ import annotations

from typing import Any, NoReturn

# Every special method through which Python code can use a value (without their underscores).
_USES = """
    abs add aiter and await bool bytes call ceil complex contains delitem divmod enter eq exit float floor
    floordiv format ge getitem gt hash iadd iand ifloordiv ilshift imatmul imod imul index int invert ior ipow
    irshift isub iter itruediv ixor le len lshift lt matmul mod mul ne neg next or pos pow radd rand rdivmod repr
    reversed rfloordiv rlshift rmatmul rmod rmul ror round rpow rrshift rshift rsub rtruediv rxor setitem str sub
    truediv trunc xor
"""


class OptionRead(BaseException):
    """The forward used an option that a probe stood for. A BaseException, so that no ``except Exception`` hides it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _raise_read(self: OptionProbe, *_args: Any, **_kwargs: Any) -> NoReturn:
    error = OptionRead(object.__getattribute__(self, "_name"))
    object.__getattribute__(self, "_raised").append(error)
    raise error


class OptionProbe:
    """Stands for the value of the option ``name``: may be carried around, not used.

    Args:
        raised: takes in what is raised, for code that catches everything.
    """

    def __init__(self, name: str, raised: list[BaseException] | None = None) -> None:
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_raised", [] if raised is None else raised)

    def __getattribute__(self, attribute: str) -> Any:
        if attribute in ("__copy__", "__deepcopy__"):
            return object.__getattribute__(self, attribute)
        _raise_read(self)

    def __copy__(self) -> OptionProbe:
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> OptionProbe:
        return self

    @classmethod
    def __torch_function__(cls, _function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        operands = (*args, *(kwargs or {}).values())
        stand_in = next(value for value in operands if type(value) is cls)
        _raise_read(stand_in)

    __setattr__ = _raise_read
    __delattr__ = _raise_read


for _use in _USES.split():
    setattr(OptionProbe, f"__{_use}__", _raise_read)
