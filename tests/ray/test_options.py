# SPDX-License-Identifier: Apache-2.0
"""What a loader takes about Ray, and what it refuses before anything is started."""

from __future__ import annotations

import pickle

import pytest
from tests.support.processes import python

from penstock import Loader
from penstock.engine.backends.ray.cluster import RayOptions, checked_options
from penstock.errors import ConfigError
from penstock.optional import install_command
from penstock.torch import DataLoader

DATA = [0.0, 1.0, 2.0, 3.0]
LOADERS = pytest.mark.parametrize("make", [Loader, DataLoader])


def test_a_worker_asks_for_one_core_unless_told():
    assert checked_options("ray", None, None) == RayOptions(None, {"num_cpus": 1})
    assert checked_options("ray", {"num_cpus": 0.5}, "auto").actor == {"num_cpus": 0.5}
    assert checked_options("ray", {"num_gpus": 1}, None).actor == {"num_cpus": 1, "num_gpus": 1}


def test_the_users_mapping_is_not_kept():
    given = {"num_cpus": 2}
    options = checked_options("ray", given, None)
    given["num_cpus"] = 3
    assert options.actor["num_cpus"] == 2


def test_options_show_no_values_and_pickle():
    options = checked_options("ray", {"runtime_env": {"env_vars": {"TOKEN": "hunter2"}}}, None)
    assert "hunter2" not in repr(options)
    assert pickle.loads(pickle.dumps(options)) == options


@LOADERS
@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"ray_options": {}}, ConfigError, "backend='process'"),
        ({"address": "auto"}, ConfigError, "address is for workers that are Ray actors"),
        ({"address": "auto", "backend": "thread"}, ConfigError, "backend='thread'"),
    ],
)
def test_what_is_rays_needs_its_backend(make, arguments, error, said):
    with pytest.raises(error, match=said):
        make(DATA, num_workers=1, **arguments)


@LOADERS
@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"name": "mine"}, ConfigError, "'name', which the loader decides"),
        ({"max_restarts": 3}, ConfigError, "replaced as on_error says"),
        ({"max_concurrency": 3}, ConfigError, "one batch at a time"),
        ({"lifetime": "detached"}, ConfigError, "as long as their loader"),
        ([("num_cpus", 1)], TypeError, "a mapping of option names to values, .*got list"),
        # What Ray says.
        ({"num_cpus": -1}, ConfigError, r"ray_options\['num_cpus'\].* cannot be negative"),
        ({"num_cpus": "2"}, ConfigError, r"ray_options\['num_cpus'\].*TypeError: .*'str'"),
        ({"memory": float("nan")}, ConfigError, r"ray_options\['memory'\].* NaN"),
        ({"resources": 3}, ConfigError, r"ray_options\['resources'\].*TypeError: .*'int'"),
        ({"resources": {"disk": "much"}}, ConfigError, r"ray_options\['resources'\]"),
        ({"accelerator_type": 3}, ConfigError, r"ray_options\['accelerator_type'\].*'int'"),
        ({3: 1}, ConfigError, r"ray_options\[3\].*must be strings"),
        ({"num_cores": 1}, ConfigError, r"ray_options\['num_cores'\].*[Ii]nvalid option"),
        ({"pool": "images"}, ConfigError, r"ray_options\['pool'\].*[Ii]nvalid option"),
        ({"scheduling_strategy": 3}, ConfigError, r"ray_options\['scheduling_strategy'\]"),
        ({"label_selector": {"a": 3}}, ConfigError, r"ray_options\['label_selector'\]"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(make, options, error, said):
    with pytest.raises(error, match=said):
        make(DATA, num_workers=1, backend="ray", ray_options=options)


def test_what_ray_says_of_a_runtime_env_is_not_repeated():
    env = {"working_dir": 3, "env_vars": {"TOKEN": "hunter2"}}
    with pytest.raises(ConfigError, match=r"ray_options\['runtime_env'\]") as caught:
        Loader(DATA, num_workers=1, backend="ray", ray_options={"runtime_env": env})
    assert "hunter2" not in str(caught.value)
    assert caught.value.__suppress_context__


@LOADERS
@pytest.mark.parametrize(("address", "error"), [("", ConfigError), (6379, TypeError)])
def test_an_address_is_a_text(make, address, error):
    with pytest.raises(error, match="address"):
        make(DATA, num_workers=1, backend="ray", address=address)


@LOADERS
def test_a_loader_keeps_what_it_was_given(make):
    options = {"num_cpus": 0.5, "resources": {"near": 1}}
    loader = make(DATA, num_workers=1, backend="ray", ray_options=options, address="auto")
    assert loader.ray_options is options
    assert (loader.address, loader.backend) == ("auto", "ray")
    plain = make(DATA)
    assert (plain.ray_options, plain.address) == (None, None)


@LOADERS
def test_a_start_method_is_not_for_actors(make):
    with pytest.raises(ConfigError, match="multiprocessing_context='spawn' says how worker proc"):
        make(DATA, num_workers=1, backend="ray", multiprocessing_context="spawn")


@LOADERS
def test_auto_is_refused_as_it_counts_the_cores_of_one_machine(make):
    with pytest.raises(ConfigError, match=r"the cores and the memory of this machine.*Give a num"):
        make(DATA, num_workers="auto", backend="ray")


@LOADERS
def test_an_unknown_backend_is_told_which_there_are(make):
    with pytest.raises(ConfigError, match="'process', 'thread', 'ray'"):
        make(DATA, backend="dask")


@LOADERS
def test_without_ray_a_loader_without_workers_works_and_the_error_of_others_names_the_extra(make):
    code = (
        f"import sys; sys.modules['ray'] = None; from {make.__module__} import {make.__name__}\n"
        "from penstock.errors import MissingExtraError\n"
        f"loader = {make.__name__}([0.0, 1.0], backend='ray', ray_options={{'num_cpus': 2}})\n"
        "print([batch.tolist() for batch in loader])\n"
        f"try: {make.__name__}([0.0, 1.0], backend='ray', num_workers=1)\n"
        "except MissingExtraError as error: print(error)"
    )
    done = python("-c", code)
    batches, _, said = done.stdout.partition("\n")
    assert (batches, done.returncode) == ("[[0.0], [1.0]]", 0), done.stderr
    assert said.startswith('backend="ray" needs Ray')
    assert said.endswith(f"Install it with: {install_command('ray')}\n")


def test_importing_penstock_or_making_other_loaders_does_not_import_ray():
    code = (
        "import sys, penstock, penstock.torch\n"
        "list(penstock.Loader([0.0], num_workers=1)); list(penstock.torch.DataLoader([0.0]))\n"
        "print('ray' in sys.modules)"
    )
    done = python("-c", code)
    assert done.stdout == "False\n", done.stderr


def test_tune_measures_one_machine():
    from penstock.cli.tune import _settings

    with pytest.raises(ConfigError, match="What Ray's workers give depends"):
        _settings("1", "2", "process,ray")
