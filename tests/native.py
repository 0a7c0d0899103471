"""For tests of the fused path, which runs wherever its library can be built: nothing else may excuse it."""

import pytest

from outrider.engine.native.build import BuildError
from outrider.engine.native.library import library


def skip_without_library() -> None:
    try:
        library()
    except BuildError as error:
        pytest.skip(f"the C++ forward cannot be built on this machine: {error}")
