"""`longhorizon check` neither cries wolf nor sleeps."""

import longhorizon as lh
from longhorizon import checking
from longhorizon.recipe import Recipe


def test_the_kink_of_a_relu_is_no_disagreement():
    """With this seed a shift of 1e-4 steps over one, and central differences are off by 8 %."""
    rows, passed = checking.check_engines(Recipe(seed=2), 12)
    assert passed, rows


def test_a_wrong_engine_is_found(monkeypatch):
    whole = lh.Adjoint.begin

    def begin(engine, problem, saved=None):
        run = whole(engine, problem, saved)
        if engine.store == "sqrt":
            run.engine = lh.Adjoint(store="sqrt", clip=1e-3)
        return run

    monkeypatch.setattr(lh.Adjoint, "begin", begin)
    rows, passed = checking.check_engines(Recipe(), 4)
    assert not passed
    assert [row["verdict"].startswith("over") for row in rows] == [False, True, False, False, False]
