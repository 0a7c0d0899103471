"""A target whose own noise is the same at every position of a sequence."""

from outrider.engine.sampling import coupled
from tests.law.faults import replace, run_target

uniforms = coupled.uniforms


def repeated(params, position, ids):
    return uniforms(params, 0, ids)


if __name__ == "__main__":
    replace(coupled, "uniforms", repeated)
    run_target()
