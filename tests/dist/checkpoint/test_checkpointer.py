"""Checkpoints in one process: what is saved comes back, damage is found and said, a kill loses nothing."""

import copy
import errno
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ltc_dist as ltd
from ltc_core.errors import CheckpointError, CheckpointFormatError, CheckpointIOError
from ltc_core.serialization import atomic, directory
from ltc_core.serialization.directory import Plan
from ltc_dist.checkpoint import Stopped, commit, layout, lock, reading
from ltc_dist.checkpoint.resplit import loader_state
from tests import prepared

ROOT = Path(__file__).parents[3]


class Run:
    """A small training run on the device, with everything that has a state."""

    def __init__(
        self, directory: Path, seed: int = 0, generator: bool = False, **options: Any
    ) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        device = ltd.lazy_device()
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 1)
        )
        self.model.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 5], 0.5)
        data = TensorDataset(torch.arange(96.0).reshape(24, 4) / 96)
        order = torch.Generator().manual_seed(11) if generator else None
        self.loader = ltd.MpDeviceLoader(DataLoader(data, 4, shuffle=True, generator=order), device)
        self.checkpointer = ltd.Checkpointer(
            directory,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            loader=self.loader,
            **options,
        )

    def train(self, to: int, step: int = 0, epoch: int = 0) -> list[float]:
        """Train until step `to`; a number of each generator goes into the losses."""
        losses = []
        while step < to:
            for (x,) in self.loader:
                self.optimizer.zero_grad()
                loss = (self.model(x) - random.random() - np.random.rand()).square().mean()
                loss.backward()
                ltd.optimizer_step(self.optimizer)
                self.scheduler.step()
                losses.append(loss.item())
                step += 1
                self.checkpointer.step(step, epoch=epoch)
                if step == to:
                    break
            else:
                epoch += 1
        return losses


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()
    }


@pytest.mark.parametrize(("background", "generator"), [(True, True), (False, False)])
def test_a_resumed_run_goes_on_as_if_nothing_had_been(
    tmp_path: Path, background: bool, generator: bool
) -> None:
    """In mid-epoch of the second epoch, shuffled by a generator of the loader's own or by PyTorch's."""
    undisturbed = Run(tmp_path / "whole", generator=generator)
    whole = undisturbed.train(14)
    undisturbed.checkpointer.close()
    first = Run(tmp_path / "a", generator=generator, every=4, background=background)
    assert first.checkpointer.restore() is None
    losses = first.train(10)
    first.checkpointer.close()

    second = Run(tmp_path / "a", seed=5, generator=generator, every=4)
    found = second.checkpointer.restore()
    assert found is not None and (found.step, found.values) == (8, {"epoch": 1})
    losses[8:] = second.train(14, found.step, found.values["epoch"])
    second.checkpointer.close()
    assert losses == whole


class Noisy(TensorDataset):
    """Draws from all global generators."""

    def __getitem__(self, index: Any) -> Any:
        (x,) = super().__getitem__(index)
        return (x * random.random() + np.random.rand() + torch.rand(()),)


def test_a_resumed_run_has_the_samples_it_would_have_had(tmp_path: Path) -> None:
    """Of a dataset that draws from the generators that the script draws from."""

    def noisy(run: Run) -> Run:
        data = Noisy(torch.arange(96.0).reshape(24, 4) / 96)
        run.loader._loader = DataLoader(data, 4, shuffle=True)
        return run

    undisturbed = noisy(Run(tmp_path / "whole"))
    whole = undisturbed.train(14)
    undisturbed.checkpointer.close()
    first = noisy(Run(tmp_path / "a", every=4))
    losses = first.train(10)
    first.checkpointer.close()
    second = noisy(Run(tmp_path / "a", seed=5, every=4))
    assert second.checkpointer.restore() is not None
    assert losses[:8] + second.train(14, 8, 1) == whole
    second.checkpointer.close()


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    run = Run(tmp_path, every=1, keep=2)
    run.train(5)
    run.checkpointer.close()
    assert run.checkpointer.steps() == [4, 5]
    names = {"latest", "lock", "step_000000004", "step_000000005"}
    assert {p.name for p in tmp_path.iterdir()} == names
    assert (tmp_path / "latest").read_text() == "step_000000005\n"
    assert {p.name for p in (tmp_path / "step_000000005").iterdir()} == {
        "manifest.json",
        "shared",
        "rank_00000",
    }


def test_all_are_kept_if_asked_for(tmp_path: Path) -> None:
    run = Run(tmp_path, every=1, keep=None)
    run.train(5)
    run.checkpointer.close()
    assert run.checkpointer.steps() == [1, 2, 3, 4, 5]


def test_who_only_looks_reads_without_the_objects(tmp_path: Path) -> None:
    assert ltd.latest_checkpoint(tmp_path) is None
    run = Run(tmp_path, every=2)
    run.train(4)
    run.checkpointer.close()
    found = ltd.latest_checkpoint(tmp_path)
    assert found is not None and (found.step, found.world_size) == (4, 1)
    state = found.state()
    assert state.keys() == {"model", "optimizer", "scheduler"}
    for name, value in run.model.state_dict().items():
        assert state["model"][name].equal(value.cpu()), name
    assert ltd.latest_checkpoint(tmp_path, step=2).step == 2  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3 in .*\n  got: steps 2, 4"):
        ltd.latest_checkpoint(tmp_path, step=3)


# -- damage ----------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    os.truncate(path, 100)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def remove(path: Path) -> None:
    path.unlink()


def swap_index(path: Path) -> None:
    """The index of another part: whole in itself, and not of this checkpoint."""
    other = path.parents[2] / "step_000000002" / "shared" / "index.json"
    path.write_bytes(other.read_bytes())
    for file in other.parent.glob("*.safetensors"):
        (path.parent / file.name).write_bytes(file.read_bytes())


DAMAGE = [
    (cut, "shared/t_00001.safetensors", r"shared/t_00001.safetensors: 100 of \d+ bytes"),
    (
        flip,
        "shared/t_00001.safetensors",
        r"t_00001.safetensors: its \d+ bytes are not what was written",
    ),
    (remove, "shared/t_00001.safetensors", r"shared/t_00001.safetensors: missing"),
    (flip, "shared/index.json", r"shared/index.json: "),
    (remove, "manifest.json", r"manifest.json is missing"),
    (flip, "manifest.json", r"manifest.json: "),
    (flip, "rank_00000/index.json", r"rank_00000/index.json: "),
    (swap_index, "shared/index.json", r"shared/index.json: it is of another checkpoint"),
]


@pytest.mark.parametrize(("damage", "name", "words"), DAMAGE)
def test_what_is_damaged_is_named_and_the_one_before_taken(
    damage: Any, name: str, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, every=2)
    run.train(4)
    run.checkpointer.close()
    damage(tmp_path / "step_000000004" / name)
    again = Run(tmp_path, seed=3, every=2)
    with caplog.at_level(logging.WARNING, logger="ltc"):
        found = again.checkpointer.restore()
    assert found is not None and found.step == 2
    assert "step_000000004" in caplog.text and "using step_000000002" in caplog.text
    assert re.search(words, caplog.text), caplog.text
    again.train(4, 2)
    again.checkpointer.close()  # in the place of the damaged one
    assert again.checkpointer.steps() == [2, 4]
    assert ltd.latest_checkpoint(tmp_path).state()  # type: ignore[union-attr]


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_newest_checkpoint_that_cannot_be_read_now_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(reading, "_PAUSES_S", (0.0, 0.0))
    run = Run(tmp_path)
    run.checkpointer.save(1)
    run.checkpointer.save(2)
    run.checkpointer.close()
    fails = 2
    real = layout.Manifest.read

    def read(path: str) -> Any:
        nonlocal fails
        if path.endswith("2") and fails:
            fails -= 1
            raise OSError(number, os.strerror(number), path)
        return real(path)

    monkeypatch.setattr(layout.Manifest, "read", read)
    again = Run(tmp_path)
    found = again.checkpointer.restore()
    assert found is not None and found.step == 2 and fails == 0  # the error has passed

    fails = 1000
    for restore in (again.checkpointer.restore, lambda: ltd.latest_checkpoint(tmp_path)):
        with pytest.raises(CheckpointIOError, match="cannot be read, and may be whole") as raised:
            restore()
        assert raised.value.errno == number and "restore(step=)" in str(raised.value)
    assert again.checkpointer.restore(step=1).step == 1  # type: ignore[union-attr]
    fails = 0
    again.checkpointer.close()
    assert ltd.latest_checkpoint(tmp_path).step == 2  # type: ignore[union-attr]


def test_a_kill_while_an_old_one_is_removed_leaves_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, keep=1, background=False)
    run.checkpointer.save(1)

    class Killed(BaseException):
        pass

    def killed(path: str) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(commit, "discard", killed)
        with pytest.raises(Killed):
            run.checkpointer.save(2)
    assert run.checkpointer.steps() == [2]
    run.checkpointer.close()
    Run(tmp_path).checkpointer.close()  # sweeps
    assert sorted(name for name in os.listdir(tmp_path) if name.startswith("step_")) == [
        "step_000000002"
    ]


def test_if_all_are_damaged_nothing_is_loaded(tmp_path: Path) -> None:
    run = Run(tmp_path, every=2)
    run.train(4)
    run.checkpointer.close()
    for path in tmp_path.glob("step_*/shared/t_00000.safetensors"):
        flip(path)
    again = Run(tmp_path, seed=3)
    before = {k: v.cpu() for k, v in again.model.state_dict().items()}
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .* is whole\n  got: step_0+4: shared/t"
    ):
        again.checkpointer.restore()
    assert all(v.cpu().equal(before[k]) for k, v in again.model.state_dict().items())
    again.checkpointer.close()


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, every=2)
    run.train(2)
    run.checkpointer.close()
    path = tmp_path / "step_000000002" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 7}))
    with pytest.raises(
        CheckpointError, match=r"manifest.json: format version 7, and this library reads 1"
    ):
        ltd.latest_checkpoint(tmp_path)


# -- what does not fit -----------------------------------------------------------------------------


def test_another_model_is_told_by_its_differences(tmp_path: Path) -> None:
    run = Run(tmp_path, every=2)
    run.train(2)
    run.checkpointer.close()
    model = nn.Sequential(nn.Linear(4, 9), nn.Dropout(0.3), nn.Linear(9, 1))
    with ltd.Checkpointer(tmp_path, model=model) as other:
        words = (
            r"model does not fit\n  got: not here: 2.running_mean.*3.bias; "
            r"of another size: 0.weight: \(8, 4\), here \(9, 4\)"
        )
        with pytest.raises(CheckpointError, match=words):
            other.restore()
        assert other.restore(skip=["model"]).step == 2  # type: ignore[union-attr]


def test_another_optimizer_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    run = Run(tmp_path, every=2)
    run.train(2)
    run.checkpointer.close()
    again = Run(tmp_path / "other")
    again.checkpointer.close()
    before = again.model[0].weight.cpu()
    few = torch.optim.SGD(again.model[0].parameters())
    with ltd.Checkpointer(tmp_path, model=again.model, optimizer=few) as other:
        with pytest.raises(
            CheckpointError, match=r"optimizer does not fit\n  got: .*group 0: 6, here 2"
        ):
            other.restore()
    assert again.model[0].weight.cpu().equal(before)


def test_an_object_that_was_not_saved_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path, every=2)
    run.train(2)
    run.checkpointer.close()
    with ltd.Checkpointer(tmp_path, model=run.model, teacher=run.model) as other:
        with pytest.raises(
            CheckpointError, match=r"has no teacher\n  got: it has model, optimizer"
        ):
            other.restore()


def test_a_run_that_forgot_to_restore_does_not_overwrite(tmp_path: Path) -> None:
    run = Run(tmp_path, every=2)
    run.train(4)
    run.checkpointer.close()
    before = files_of(tmp_path / "step_000000004")
    again = Run(tmp_path, every=2)
    with pytest.raises(
        CheckpointError, match=r"has not restored\n  got: steps 2, 4\n  Next: call restore"
    ):
        again.train(4)
    again.checkpointer.close()
    assert files_of(tmp_path / "step_000000004") == before


def test_going_back_removes_what_was_later_once_a_new_one_is_there(tmp_path: Path) -> None:
    run = Run(tmp_path, every=2)
    run.train(6)
    run.checkpointer.close()
    again = Run(tmp_path, every=1)
    assert again.checkpointer.restore(step=2).step == 2  # type: ignore[union-attr]
    assert again.checkpointer.steps() == [2, 4, 6]
    again.train(3, 2)
    again.checkpointer.close()
    assert again.checkpointer.steps() == [2, 3]


# -- saving that fails -----------------------------------------------------------------------------


def test_what_has_no_place_is_named_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(
        CheckpointFormatError, match=r"cannot save checkpoint\['values'\]\['tags'\]: .*set"
    ):
        run.checkpointer.save(1, tags={1, 2})
    run.checkpointer.save(1, tags=[1, 2])
    run.checkpointer.close()
    assert {p.name for p in tmp_path.iterdir()} == {"latest", "lock", "step_000000001"}


@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_leaves_the_older_one(
    background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, background=background)
    run.checkpointer.save(1)
    run.checkpointer.wait()

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(atomic, "fsync", full)
        with pytest.raises(
            CheckpointIOError, match="No space left on device while writing"
        ) as raised:
            run.checkpointer.save(2)
            run.checkpointer.wait()
    assert raised.value.errno == 28
    assert {p.name for p in tmp_path.iterdir()} == {"latest", "lock", "step_000000001"}
    run.checkpointer.save(3)
    run.checkpointer.close()
    assert run.checkpointer.steps() == [1, 3]


def test_a_directory_without_a_name_is_refused() -> None:
    """As of a variable that is not set: checkpoints would be written to the working directory."""
    with pytest.raises(CheckpointError, match="needs a directory(?s:.*)a variable that is not set"):
        ltd.Checkpointer("")


def test_training_may_go_on_without_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    run = Run(tmp_path, every=2, on_error="warn")
    with monkeypatch.context() as patched:
        patched.setattr(atomic, "fsync", full)
        run.train(3)
        run.checkpointer.wait()
    assert "training goes on without this checkpoint: No space left" in capsys.readouterr().err
    run.train(4, 3)
    run.checkpointer.close()
    assert run.checkpointer.steps() == [4]


@pytest.mark.parametrize("path", ["/dev/null/runs", "file"])
def test_a_directory_that_cannot_be_is_told_before_training(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        CheckpointIOError,
        match=r"cannot be written to .*\n  got: rank 0: .*(File exists|Not a directory)",
    ):
        ltd.Checkpointer(tmp_path / path, model=nn.Linear(1, 1))


def test_two_jobs_do_not_write_to_one_directory(tmp_path: Path) -> None:
    script = """
        import sys, torch, ltc_dist as ltd
        held = ltd.Checkpointer(sys.argv[1], model=torch.nn.Linear(1, 1))
        print("there", flush=True)
        sys.stdin.read()
    """
    other = prepared.start(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with other:
        assert other.stdout is not None and other.stdout.readline() == "there\n"
        words = rf"got: rank 0: another job writes checkpoints in {tmp_path} \(pid {other.pid} on "
        with pytest.raises(CheckpointIOError, match=words):
            ltd.Checkpointer(tmp_path, model=nn.Linear(1, 1))
        other.kill()
    ltd.Checkpointer(tmp_path, model=nn.Linear(1, 1)).close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep": 0}, "keep must be a whole number, 1 or more, or None"),
        ({"every": -1}, "every must be a whole number"),
        ({"on_error": "ignore"}, "there is no on_error='ignore'"),
        ({"epoch": 3}, "epoch has no state to be saved\n  got: int"),
    ],
)
def test_bad_arguments(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        ltd.Checkpointer(tmp_path, **options)


# -- killed while writing --------------------------------------------------------------------------

KILLED = """
    import os, sys, torch, ltc_dist as ltd
    from ltc_core.serialization import directory, tensor_file
    from ltc_dist.checkpoint import commit, transaction

    site, path = sys.argv[1:]
    module = directory if site == "write_index" else commit
    model = torch.nn.Linear(3, 3)
    saver = ltd.Checkpointer(path, model=model, every=1)
    saver.step(1, a=1)
    saver.wait()
    with torch.no_grad():
        model.weight.fill_(2)

    real = getattr(module, site)
    def killed(*args):
        if os.environ["WHEN"] == "after":
            real(*args)
        os.kill(os.getpid(), 9)
    setattr(module, site, killed)
    saver.step(2, a=2)
    saver.wait()
"""
SITES = ["write_part", "write_index", "write_manifest", "publish", "point_latest", "prune"]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("site", SITES)
def test_killed_while_it_saves(site: str, when: str, tmp_path: Path) -> None:
    done = prepared.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), site, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "WHEN": when},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    is_published = SITES.index(site) > SITES.index("publish") or (site, when) == (
        "publish",
        "after",
    )
    model = nn.Linear(3, 3)
    with ltd.Checkpointer(tmp_path, model=model) as again:
        found = again.restore()
        assert found is not None
        assert found.step == found.values["a"] == (2 if is_published else 1)
        assert bool((model.weight == 2).all()) == is_published
        again.save(3)
    assert not [p.name for p in tmp_path.iterdir() if ".tmp-" in p.name]


def test_killed_between_the_renames_of_a_step_that_is_saved_again(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    with ltd.Checkpointer(tmp_path, model=model) as saver:
        saver.save(1)
    final = tmp_path / layout.step_name(1)
    final.rename(f"{final}.old-0a0a0a0a")
    with ltd.Checkpointer(tmp_path, model=model) as again:
        assert again.restore().step == 1  # type: ignore[union-attr]
    assert final.is_dir()


# -- going back ------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def saver(path: Path, **options: Any) -> ltd.Checkpointer:
    return ltd.Checkpointer(
        path, **{"keep": None, "background": False, **options}, model=nn.Linear(2, 2)
    )


def gone_back(path: Path) -> None:
    """Steps 2, 4 and 6; then a run that restores 2 and saves 3."""
    with saver(path) as first:
        for step in (2, 4, 6):
            first.save(step)
    with saver(path) as second:
        assert second.restore(step=2).step == 2  # type: ignore[union-attr]
        second.save(3, is_new=True)


def restored(path: Path, step: int | None = None) -> Any:
    with saver(path) as again:
        found = again.restore(step)
    return found.step if found is not None else None


@pytest.mark.parametrize("latest", ["as it is", None, "", "step_000000042\n", "step_000000006\n"])
def test_an_abandoned_step_is_not_taken(
    latest: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever became of `latest`: it decides nothing."""
    gone_back(tmp_path)
    assert (tmp_path / "latest").read_text() == "step_000000003\n"
    if latest is None:
        (tmp_path / "latest").unlink()
    elif latest != "as it is":
        (tmp_path / "latest").write_text(latest)
    with caplog.at_level(logging.WARNING, logger="ltc"), saver(tmp_path) as again:
        assert again.steps() == [2, 3, 4, 6]
        assert again.restore().step == 3  # type: ignore[union-attr]
        said = (
            r"using step_000000003 .* behind the later steps 4, 6, .* restore\(step=6\) takes one"
        )
        assert re.search(said, caplog.text)
        is_said = "names step_000000042, which is not there" in caplog.text
        assert is_said == (latest == "step_000000042\n")
        again.save(4, is_new=True)
    assert ltd.latest_checkpoint(tmp_path).values == {"is_new": True}  # type: ignore[union-attr]
    assert restored(tmp_path) == 4  # it is of this run now; 6 is not


def test_an_abandoned_step_can_be_named(tmp_path: Path) -> None:
    gone_back(tmp_path)
    with saver(tmp_path) as again:
        assert again.restore(step=6).step == 6  # type: ignore[union-attr]
        again.save(7)
    flip(tmp_path / "step_000000007" / "manifest.json")
    assert restored(tmp_path) == 6


def test_what_lies_between_is_abandoned_as_well(tmp_path: Path) -> None:
    """A run that goes from 2 to 7 at once has not been at 4 and 6."""
    gone_back(tmp_path)
    with saver(tmp_path, keep=2) as again:
        again.restore(step=2)
        again.save(7)
        assert again.steps() == [2, 7]


def test_if_only_abandoned_ones_are_left_nothing_begins_anew(tmp_path: Path) -> None:
    gone_back(tmp_path)
    for step in (2, 3):
        flip(tmp_path / layout.step_name(step) / "manifest.json")
    words = r"is whole\n  got: step_000000003: .*, step_000000004: abandoned, .*\n  Next: .*step="
    with pytest.raises(CheckpointError, match=words):
        restored(tmp_path)
    assert restored(tmp_path, 4) == 4


@pytest.mark.parametrize("keep", [None, 2])
@pytest.mark.parametrize(
    ("site", "taken"),
    [("abandon", 6), ("write_manifest", 2), ("publish", 2), ("point_latest", 4), ("prune", 4)],
)
def test_killed_while_it_abandons(
    site: str, taken: int, keep: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 4 is saved anew: the run has gone back once the later steps are marked, and never is the old 4 taken."""
    with saver(tmp_path) as first:
        for step in (2, 4, 6):
            first.save(step)

    def killed(*args: Any) -> None:
        raise Killed

    with saver(tmp_path, keep=keep) as second:
        second.restore(step=2)
        with monkeypatch.context() as patched:
            patched.setattr(commit, site, killed)
            with pytest.raises(Killed):
                second.save(4, is_new=True)
    with saver(tmp_path) as again:
        found = again.restore()
    assert found is not None and found.step == taken
    assert ("is_new" in found.values) == (taken == 4)


# -- what is not ours ------------------------------------------------------------------------------


def test_only_what_is_ours_is_cleared_away(tmp_path: Path) -> None:
    kept = [
        "model.old-1.pt",
        "x.tmp-1/weights",
        "step_000000005.tmp-0a0a0a0a/weights",  # our name, and something else in it
        "step_000000006.old-0a0a0a0a/manifest.json",  # of another program
        "step_000000001/model.safetensors",  # of another program, with a name like ours
        "step_000000009.tmp-mine/shared/notes",
        ".probe-host-7",
        ".ltc-probe-00112233445566aa",  # our name, and something else in it
    ]
    for name in kept:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    left = tmp_path / "step_000000007.tmp-0a0a0a0a"
    commit.write_part(str(left), "shared", Plan({}, "checkpoint"))
    (left / "rank_00000").mkdir()
    (tmp_path / "step_000000008.tmp-0b0b0b0b").mkdir()
    commit.probe(str(tmp_path), "00112233445566bb")  # its process was killed
    with ltd.Checkpointer(tmp_path, keep=1, model=nn.Linear(1, 1)) as found:
        assert not list(tmp_path.glob("*-00112233445566bb"))
        assert not left.exists() and not (tmp_path / "step_000000008.tmp-0b0b0b0b").exists()
        found._is_behind = False
        found.save(2)
        found.save(3)
        with pytest.raises(CheckpointIOError, match="refusing to replace .*step_000000001, which"):
            found.save(1)
            found.wait()
    assert sorted(files_of(tmp_path).keys() & set(kept)) == sorted(kept)
    assert found.steps() == [1, 3]


def test_two_in_one_process_do_not_write_to_one_directory(tmp_path: Path) -> None:
    with ltd.Checkpointer(tmp_path, model=nn.Linear(1, 1)) as first:
        (tmp_path / "link").symlink_to(tmp_path)
        words = r"got: rank 0: another Checkpointer of this process writes in"
        for path in (tmp_path, tmp_path / "link"):
            with pytest.raises(CheckpointIOError, match=words):
                ltd.Checkpointer(path, model=nn.Linear(1, 1))
        with pytest.raises(CheckpointError, match=r"cannot be copied or pickled\n  got: it holds"):
            copy.copy(first)
        first.save(1)
    ltd.Checkpointer(tmp_path, model=nn.Linear(1, 1)).close()


def test_the_lock_outlives_copies_and_forks(tmp_path: Path) -> None:
    """Another process cannot have it while this one has, though it was read here; a child that lives on lets it go."""
    script = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"

    def attempt() -> int:
        command = [sys.executable, "-c", script, str(tmp_path / "lock")]
        return subprocess.run(command, stderr=subprocess.DEVNULL).returncode

    held = lock.claim(str(tmp_path))
    shutil.copytree(tmp_path, tmp_path.with_name("copied"))
    goes_on, told = os.pipe()
    child = os.fork()
    if child == 0:
        held.release()  # of the parent: nothing to do here
        os.read(goes_on, 1)
        os._exit(0)
    assert attempt() == 1
    held.release()
    assert attempt() == 0  # though the child lives
    os.write(told, b"\0")
    os.waitpid(child, 0)
    os.close(goes_on)
    os.close(told)


def test_a_lock_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("not to be lost")
    places = [tmp_path / name for name in ("link", "file", "pipe", "directory", "old")]
    for place in places:
        place.mkdir()
    link, file, pipe, directory, old = (place / "lock" for place in places)
    link.symlink_to(precious)
    os.link(precious, file)
    os.mkfifo(pipe)
    directory.mkdir()
    for place in places[:4]:
        with pytest.raises(CheckpointIOError, match="lock is not the lock of a checkpoint dir"):
            ltd.Checkpointer(place, model=nn.Linear(1, 1))
    assert precious.read_text() == "not to be lost"
    old.write_text("pid 1234567 on a-host-with-a-name\n")  # as it was written before
    ltd.Checkpointer(old.parent, model=nn.Linear(1, 1)).close()
    assert re.fullmatch(rf"pid {os.getpid()} on \S+\n *\n", old.read_text())


# -- reading what is needed ------------------------------------------------------------------------


def test_only_what_a_process_needs_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four processes' shards each reads its own; one process alone reads none, and where the loaders were."""
    whole = tmp_path / layout.step_name(3)
    shard = {"state": {"moments": torch.zeros(1000)}, "batch_size": None}
    of_loader = {"num_batches": 5, "rng_state": torch.zeros(100)}
    shared = {"model": {"w": torch.zeros(2000)}, "other": {"w": torch.zeros(3000)}}
    trees: dict[str, Any] = {"shared": {"objects": shared, "values": {"a": torch.zeros(10)}}}
    for rank in range(4):
        own = {"zero": shard, "loader": {"state": of_loader, "batch_size": 2}}
        trees[layout.own_part(rank)] = {"objects": own, "random": {"torch": torch.zeros(50)}}
    parts = {n: commit.write_part(str(whole), n, Plan(t, "c")) for n, t in trees.items()}
    commit.write_manifest(str(whole), layout.Manifest(3, 4, parts))
    counts: list[int] = []
    real = directory.read_tensor

    def counted(folder: int, entry: Any) -> torch.Tensor:
        tensor = real(folder, entry)
        counts.append(tensor.numel())
        return tensor

    monkeypatch.setattr(directory, "read_tensor", counted)

    def needed(*args: Any) -> list[int]:
        counts.clear()
        found = reading.read(str(tmp_path), 3, *args)
        assert found.names == ["model", "other", "zero", "loader"]
        return sorted(counts)

    assert needed(2, 4) == [10, 50, 100, 1000, 2000, 3000]
    assert needed(2, 4, ["model"], ["zero"]) == [10, 50, 1000, 2000]
    assert needed(0, 1, ["model"], ["loader"]) == [10, 50, 100, 2000]
    assert needed(5, 8) == [10, 100, 2000, 3000]
    counts.clear()
    assert ltd.latest_checkpoint(tmp_path).step == 3  # type: ignore[union-attr]
    assert counts == [10]


# -- SIGTERM ---------------------------------------------------------------------------------------


def test_sigterm_becomes_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    run = Run(tmp_path, every=100)
    run.train(2)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Stopped) as stopped:
        run.train(9, 2)
    assert stopped.value.code == 143
    assert run.checkpointer.steps() == [3]
    assert f"stopped by SIGTERM; step 3 is in {tmp_path}" in capsys.readouterr().err
    os.kill(os.getpid(), signal.SIGTERM)  # sent again while the process ends: changes nothing
    again = Run(tmp_path / "again")
    again.checkpointer.close()
    assert (
        signal.getsignal(signal.SIGTERM) == before
    )  # the next one does not keep what the first left


def test_a_process_that_goes_on_after_it_has_stopped_can_be_told_to_end(tmp_path: Path) -> None:
    script = f"""
import os, signal, time
import ltc_dist as ltd
from ltc_dist.checkpoint import Stopped, stopping

saver = ltd.Checkpointer({str(tmp_path / "runs")!r}, model=torch.nn.Linear(1, 1))
os.kill(os.getpid(), signal.SIGTERM)
try:
    saver.step(1)
except Stopped:
    os.kill(os.getpid(), signal.SIGTERM)
    print("goes on", flush=True)
stopping._AGAIN_S = 0
time.sleep(0.01)
os.kill(os.getpid(), signal.SIGTERM)
print("never")
"""
    process = prepared.run(
        [sys.executable, "-c", "import torch\n" + script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (process.returncode, process.stdout) == (-signal.SIGTERM, "goes on\n"), process.stderr


def test_sigterm_is_left_alone_if_asked_for(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ltd.Checkpointer(tmp_path, model=nn.Linear(1, 1), stop_on_sigterm=False):
        assert signal.getsignal(signal.SIGTERM) == before


# -- another number of processes -------------------------------------------------------------------


def state(num_batches: int, batch_size: int = 4) -> dict[str, Any]:
    return {"state": {"num_batches": num_batches, "rng_state": None}, "batch_size": batch_size}


@pytest.mark.parametrize(
    ("saved", "batch_size", "world_size", "expected"),
    [
        ([state(3)], 4, 1, 3),
        ([state(3)] * 2, 4, 1, 6),  # 24 samples were used, 4 go at a time
        ([state(3)] * 2, 8, 1, 3),
        ([state(6)], 4, 2, 3),
        ([state(4, 2)] * 4, 8, 2, 2),
        ([state(0)] * 4, 5, 3, 0),
        ([state(6)], 8, 1, 3),  # as many processes, and other batches
        ([state(3)] * 2, 2, 2, 6),
    ],
)
def test_loaders_go_on_behind_the_samples_that_were_used(
    saved: list[Any], batch_size: int, world_size: int, expected: int
) -> None:
    for rank in range(world_size):
        found = loader_state("loader", saved, rank, world_size, batch_size)
        assert found["num_batches"] == expected


def test_samples_that_come_again_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="ltc"):
        assert loader_state("loader", [state(3)], 0, 2, 4)["num_batches"] == 1
    assert (
        "loader: 4 samples of the epoch come again: 12 were used, and now 8 go at a time"
        in caplog.text
    )


@pytest.mark.parametrize(
    ("saved", "batch_size"),
    [
        ([state(3), state(2)], 4),
        ([{"state": {"x": 1}, "batch_size": 4}] * 2, 4),
        ([state(3)] * 2, None),
        ([state(3)], None),
    ],
)
def test_what_cannot_be_dealt_out_is_said(saved: list[Any], batch_size: int | None) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"'loader' was saved by . .* (be dealt out to 1|go on with other)(.|\n)*restore\(skip=\['loader'\]\)",
    ):
        loader_state("loader", saved, 0, 1, batch_size)
