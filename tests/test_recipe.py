"""Recipes: defaults that depend on other keys, and a built-in model's initialisation."""

import tomllib

import pytest
import torch

import longhorizon as lh
from longhorizon import data, recipe_text
from longhorizon import recipe as recipes


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, (64, 0.2)),
        ({"data": "digits"}, (64, 0.2)),
        ({"data": "cifar10", "model": "wrn-16-1"}, (256, 0.05)),
        ({"data": "CIFAR-100"}, (256, 0.05)),
        ({"data": "mnist", "batch_size": 64}, (64, 0.05)),
        ({"data": "svhn", "val_fraction": 0.2}, (256, 0.2)),
        ({"data": "cifar10", "task": "mine:make"}, (64, 0.2)),  # of no effect there
    ],
)
def test_batch_size_and_held_out_share_are_the_paper_s_for_its_data(content, expected):
    made = recipes.make_recipe(content)
    assert (made.batch_size, made.val_fraction) == expected
    assert recipes.make_recipe(tomllib.loads(recipe_text.to_toml(made))) == made  # as a run records it


def test_the_recipe_of_an_older_run_is_what_it_was():
    old = tomllib.loads(recipe_text.to_toml(recipes.make_recipe({"data": "cifar10"})))
    old |= {"batch_size": 64, "val_fraction": 0.2}  # its defaults, written out
    del old["init"]
    made = recipes.make_recipe(old)
    assert (made.batch_size, made.val_fraction, made.init) == (64, 0.2, "")


def test_a_template_with_other_data_follows_the_paper():
    text = recipe_text.template().replace('data = "digits"', 'data = "cifar10"')
    assert recipes.make_recipe(tomllib.loads(text)) == recipes.make_recipe({"data": "cifar10"})


@pytest.mark.parametrize(("init", "same"), [("", "he"), ("he", "he"), ("xavier", "xavier")])
def test_init_reaches_the_model(init, same):
    def weight(task):
        torch.manual_seed(0)
        return task.model().fc.weight

    task, _ = recipes.task_of(recipes.make_recipe({"model": "wrn-10-1", "init": init, "device": "cpu"}))
    expected = data.image_task("digits", "wrn-10-1", init=same, device="cpu")
    assert torch.equal(weight(task), weight(expected))


def test_float64_is_a_precision():
    assert recipes.make_recipe({"precision": "float64"}).dtype == "float64"
    assert recipes.make_recipe({"precision": "float64", "dtype": "float32"}).dtype == "float64"
    assert recipes.make_recipe({"dtype": "float64"}).precision == "float32"  # as older runs have it


def test_a_recorded_recipe_is_read_again_whatever_its_names_are():
    hypers = {name: {"start": 0.1, "step": 0.1} for name in ("lr", "λ", "lr/fc-1", 'a "b"\n')}
    made = recipes.make_recipe({"hypers": hypers, "data_root": "C:\\data\n\t"})
    assert recipes.make_recipe(tomllib.loads(recipe_text.to_toml(made))) == made


def test_an_overridden_name_keeps_its_dash(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text('[hypers."lr/fc-1"]\nstart = 0.1\n[hypers.weight_decay]\nstart = 0.1\n')
    made = recipes.load_recipe(path, {"hypers.lr/fc-1.start": 0.2, "hypers.weight-decay.start": 0.3, "outer-steps": 4})
    assert {key: entry["start"] for key, entry in made.hypers.items()} == {"lr/fc-1": 0.2, "weight_decay": 0.3}
    assert made.outer_steps == 4
    made = recipes.load_recipe(None, {"hypers.weight-decay/fc-1.start": 0.2})
    assert "weight_decay/fc-1" in made.hypers


def test_a_clip_by_the_norm():
    recipe = recipes.make_recipe({"rule": {"name": "adamw", "grad_clip": 0.5, "clip_by": "norm"}})
    assert recipes.rule_of(recipe) == lh.clipped(lh.adamw(), 0.5, by="norm")
    for wrong in ({"clip_by": "norm"}, {"grad_clip": 1.0, "clip_by": "nrom"}):
        with pytest.raises(recipes.RecipeError, match=r"rule\.clip_by = .*: expected 'value' or 'norm', beside rule\."):
            recipes.rule_of(recipes.make_recipe({"rule": {"name": "sgd", **wrong}}))
