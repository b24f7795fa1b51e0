"""What is read and set by the samples of ``test_bytecode.py``, as this release of Python compiles them.

    python bytecode_of_this_python.py FOLDER      which has the package ``capture``, without what needs PyTorch

Prints as JSON, by name of a sample: the paths that it reads, what it sets, the local variables that it reads, and
the names that it reads, as they are looked up and as each instruction says it.
"""

from __future__ import annotations

import json
import sys

sys.path.insert(0, sys.argv.pop())
from capture.functions.writes import types_compared, writes  # type: ignore[import-not-found]
from capture.values.bytecode import instructions, locals_read, names_read  # type: ignore[import-not-found]
from capture.values.global_reads import paths  # type: ignore[import-not-found]

found = {}
for name, text in json.load(sys.stdin).items():
    (code,) = (each for each in compile(text, name, "exec").co_consts if hasattr(each, "co_code"))
    sets = writes(code)
    found[name] = {
        "reads": [path.text(len(path.steps)) for path in paths(code)],
        "sets": sorted({*sets.variables, *sets.attributes, *(path.text(len(path.steps)) for path in sets.objects)}),
        "imports": sorted(sets.imported),
        "compares": [None if path is None else path.text(len(path.steps)) for path in types_compared(code)],
        "locals": sorted(locals_read(code)),
        "names": sorted(names_read(code)),
        "taken apart": sorted({i.of for i in instructions(code) if i.is_named and not i.name.startswith("STORE_")}),
    }
json.dump(found, sys.stdout)
