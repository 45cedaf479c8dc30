"""Which process this is: PyTorch's contract, SLURM's variables, threads, and what is only half there."""

import io
import threading

import pytest

from ltc_core.errors import SettingsError
from ltc_dist.job import ranks as module
from ltc_dist.job.ranks import (
    Ranks,
    get_local_ordinal,
    get_ordinal,
    is_master_ordinal,
    master_print,
    own_rank,
    owns_rank,
    ranks,
    read_ranks,
    replica,
    world_size,
)
from tests.core import child

CONTRACT = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SLURM = {
    "SLURM_PROCID": "7",
    "SLURM_NTASKS": "9",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_TASKS_PER_NODE": "4(x2),1",
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*CONTRACT, *SLURM, *(name for names in module._MPI for name in names)):
        monkeypatch.delenv(name, raising=False)


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_alone() -> None:
    assert ranks() == Ranks(0, 1, 0, 1)
    assert (get_ordinal(), get_local_ordinal(), world_size()) == (0, 0, 1)
    assert (get_ordinal(-1), get_local_ordinal(3), world_size(0)) == (-1, 3, 0)
    assert is_master_ordinal() and is_master_ordinal(local=False)


def test_the_contract_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, CONTRACT)
    assert ranks() == Ranks(5, 8, 1, 4)
    assert (get_ordinal(-1), get_local_ordinal(-1), world_size(0)) == (5, 1, 8)
    assert not is_master_ordinal() and not is_master_ordinal(local=False)


def test_the_first_process_of_a_rank_owns_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(module._OWNER, "")  # restored at the end
    own_rank()
    assert not owns_rank()  # one process has no ranks to speak to
    set_all(monkeypatch, CONTRACT)
    own_rank()
    assert owns_rank()
    monkeypatch.setattr(module.os, "getpid", lambda: -1)  # a process that it starts
    own_rank()
    assert not owns_rank()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # of another attempt, though it inherits
    own_rank()
    assert owns_rank()


def test_the_master_of_a_host_is_not_the_master_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, CONTRACT | {"RANK": "4", "LOCAL_RANK": "0"})
    assert is_master_ordinal() and not is_master_ordinal(local=False)


def test_without_local_ranks_there_is_one_host() -> None:
    assert read_ranks({"RANK": "2", "WORLD_SIZE": "3"}) == Ranks(2, 3, 2, 3)


def test_slurm() -> None:
    assert read_ranks(SLURM) == Ranks(7, 9, 0, 1)
    assert read_ranks(SLURM | {"SLURM_NODEID": "1", "SLURM_LOCALID": "3"}) == Ranks(7, 9, 3, 4)
    assert read_ranks(SLURM | {"SLURM_NTASKS": "1"}) == Ranks()  # a shell inside an allocation
    assert read_ranks(SLURM | CONTRACT) == Ranks(5, 8, 1, 4)  # torchrun under srun


def of_mpi(prefix: str) -> dict[str, str]:
    values = {"RANK": "5", "SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}
    return {f"{prefix}_COMM_WORLD_{name}": value for name, value in values.items()}


PMI = {"PMI_RANK": "5", "PMI_SIZE": "8"}
HYDRA = PMI | {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


@pytest.mark.parametrize("variables", [of_mpi("OMPI"), of_mpi("MV2"), HYDRA], ids=str)
def test_mpirun(variables: dict[str, str]) -> None:
    assert read_ranks(variables) == Ranks(5, 8, 1, 4)
    within_slurm = SLURM | {
        "SLURM_PROCID": "1",
        "SLURM_NTASKS": "2",
    }  # of what mpirun starts hosts by
    assert read_ranks(within_slurm | variables) == Ranks(5, 8, 1, 4)
    assert read_ranks(variables | CONTRACT | {"RANK": "6"}) == Ranks(6, 8, 1, 4)
    rank, size, *_ = variables
    assert read_ranks({rank: "0", size: "1"}) == Ranks() and read_ranks({rank: "0"}) == Ranks()
    with pytest.raises(SettingsError, match=f"{rank} says more than there are"):
        read_ranks(variables | {rank: "8"})


def test_srun_sets_a_part_of_the_variables_of_mpirun() -> None:
    assert read_ranks(SLURM | {"PMI_RANK": "7", "PMI_SIZE": "9"}) == Ranks(7, 9, 0, 1)
    assert read_ranks(PMI) == Ranks(5, 8, 5, 8)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, r"a part of a job only: WORLD_SIZE not set(?s:.*)got: RANK=0"),
        ({"LOCAL_RANK": "0"}, "RANK and WORLD_SIZE not set(?s:.*)ltc-launch"),
        (CONTRACT | {"RANK": "foo"}, "RANK must be a whole number(?s:.*)'foo'"),
        (CONTRACT | {"RANK": "-1"}, "RANK must be a whole number"),
        (CONTRACT | {"RANK": "8"}, "RANK says more than there are(?s:.*)rank 8 of 8"),
        (CONTRACT | {"LOCAL_RANK": "4"}, "on this host 4 of 4"),
    ],
)
def test_half_a_contract_is_an_error(variables: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        read_ranks(variables)


def test_half_a_contract_does_not_matter_to_a_process_that_joins_no_job() -> None:
    """Other launchers set LOCAL_RANK alone, for a script that may not use this package."""
    child.run("import ltc_dist", prelude="", LOCAL_RANK="1")


def test_a_thread_can_have_ranks_of_its_own() -> None:
    seen: list[int] = []
    with replica(Ranks(3, 4, 3, 4)):
        other = threading.Thread(target=lambda: seen.append(get_ordinal()))
        other.start()
        other.join()
        seen.append(get_ordinal())
        with replica(Ranks(1, 4, 1, 4)):
            seen.append(get_ordinal())
        seen.append(get_ordinal())
    seen.append(get_ordinal())
    assert seen == [0, 3, 1, 3, 0]


def test_only_the_master_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    master_print("alone", 1)
    set_all(monkeypatch, CONTRACT | {"RANK": "4", "LOCAL_RANK": "0"})
    master_print("not the master of the job")
    stream = io.StringIO()
    master_print("master of its host", local=True, fd=stream, flush=True)
    assert capsys.readouterr().out == "alone 1\n"
    assert stream.getvalue() == "master of its host\n"


def test_every_name_is_public() -> None:
    assert all(hasattr(module, name) for name in module.__all__)
