# SPDX-License-Identifier: Apache-2.0
"""What a loader takes about Ray, and what it refuses before anything is started."""

from __future__ import annotations

import pickle

import pytest
from tests.support.processes import python

from penstock import Loader, Ray
from penstock.errors import ConfigError
from penstock.optional import install_command
from penstock.torch import DataLoader

DATA = [0.0, 1.0, 2.0, 3.0]
LOADERS = pytest.mark.parametrize("make", [Loader, DataLoader])


def test_a_worker_asks_for_one_core_unless_told():
    assert (Ray().address, Ray().actor) == (None, {"num_cpus": 1})
    assert Ray("auto", num_cpus=0.5).actor == {"num_cpus": 0.5}
    assert Ray(num_gpus=1).actor == {"num_cpus": 1, "num_gpus": 1}


def test_options_show_no_values_and_pickle():
    options = Ray(runtime_env={"env_vars": {"TOKEN": "hunter2"}})
    assert "hunter2" not in repr(options)
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize("name", ["name", "lifetime"])
def test_options_that_cannot_be_meant_are_refused(name):
    with pytest.raises(ConfigError, match=f"'{name}', which the loader decides"):
        Ray(**{name: "mine"})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_cpus": -1}, r"Ray\(num_cpus=\).* cannot be negative"),
        ({"num_cpus": "2"}, r"Ray\(num_cpus=\).*TypeError: .*'str'"),
        ({"memory": float("nan")}, r"Ray\(memory=\).* NaN"),
        ({"resources": 3}, r"Ray\(resources=\).*TypeError: .*'int'"),
        ({"resources": {"disk": "much"}}, r"Ray\(resources=\)"),
        ({"accelerator_type": 3}, r"Ray\(accelerator_type=\).*'int'"),
        ({"num_cores": 1}, r"Ray\(num_cores=\).*[Ii]nvalid option"),
        ({"scheduling_strategy": 3}, r"Ray\(scheduling_strategy=\)"),
        ({"label_selector": {"a": 3}}, r"Ray\(label_selector=\)"),
    ],
)
def test_what_ray_says_of_an_option_is_told_when_the_loader_is_made(options, said):
    with pytest.raises(ConfigError, match=said):
        Loader(DATA, num_workers=1, backend=Ray(**options))


def test_what_ray_says_of_a_runtime_env_is_not_repeated():
    env = {"working_dir": 3, "env_vars": {"TOKEN": "hunter2"}}
    with pytest.raises(ConfigError, match=r"Ray\(runtime_env=\)") as caught:
        Loader(DATA, num_workers=1, backend=Ray(runtime_env=env))
    assert "hunter2" not in str(caught.value)
    assert caught.value.__suppress_context__


@LOADERS
def test_a_loader_keeps_what_it_was_given(make):
    options = Ray("auto", num_cpus=0.5, resources={"near": 1})
    loader = make(DATA, num_workers=1, backend=options)
    assert loader.backend is options
    assert loader._options.backend == "ray"
    assert loader._options.backend_options is options
    assert make(DATA, backend="ray").backend == "ray"
    assert "backend=Ray(address='auto')" in repr(loader)
    assert loader._settings()["backend"] == "Ray"  # of recordings


@LOADERS
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"num_workers": 1, "multiprocessing_context": "spawn"},
            "multiprocessing_context='spawn' says how worker proc",
        ),
        ({"num_workers": "auto"}, r"the cores and the memory of this machine.*Give a num"),
        ({"backend": "dask"}, "'process', 'thread', 'ray'"),
    ],
)
def test_what_contradicts_ray_is_refused(make, arguments, said):
    with pytest.raises(ConfigError, match=said):
        make(DATA, **{"backend": "ray", **arguments})


NO_RAY = """
import sys; sys.modules['ray'] = None
from penstock import Loader, Ray
from penstock.errors import MissingExtraError
print([batch.tolist() for batch in Loader([0.0, 1.0], backend=Ray(num_cpus=2))])
try: Loader([0.0, 1.0], backend='ray', num_workers=1)
except MissingExtraError as error: print(error)
"""


def test_without_ray_only_workers_raise_and_the_error_names_the_extra():
    done = python("-c", NO_RAY)
    batches, error = done.stdout.splitlines()
    assert batches == "[[0.0], [1.0]]"
    assert error.startswith('backend="ray" needs Ray'), done.stderr
    assert error.endswith(f"Install it with: {install_command('ray')}")


def test_importing_penstock_or_making_other_loaders_does_not_import_ray():
    code = (
        "import sys, penstock, penstock.ray, penstock.torch\n"
        "list(penstock.Loader([0.0], num_workers=1)); list(penstock.torch.DataLoader([0.0]))\n"
        "print('ray' in sys.modules)"
    )
    done = python("-c", code)
    assert done.stdout == "False\n", done.stderr
