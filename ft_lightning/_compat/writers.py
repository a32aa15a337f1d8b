"""The part of `_compat` about writing: loggers, checkpoints, config.yaml, the progress bar, signals.

How it works. As in `_compat`: private parts of Lightning are touched here and there only, and each function says what
of Lightning it relies on. Checked with Lightning 2.5 and 2.6 (tests/lightning).

Threads: the training thread.
"""

from __future__ import annotations

import csv
import importlib
import os
import shutil
import signal
import sys
import threading
import time
from typing import Any

from ft_lightning._compat import part

Trainer = Any


# ---------------------------------------------------------------------- who writes (leader.py)


def set_rank_zero(tree: str, rank: int) -> None:
    """Set the rank that `rank_zero_only` reads: all packages share the function of `lightning_utilities`."""
    del tree
    importlib.import_module("lightning_utilities.core.rank_zero").rank_zero_only.rank = rank


def numbers_runs(logger: Any) -> bool:
    """A logger that numbers its runs by directories. DummyLogger (fast_dev_run) has a method for every other name."""
    return "_version" in vars(logger)


def logger_version(logger: Any) -> int | str | None:
    """The version of a logger that numbers its runs by directories (CSVLogger, TensorBoardLogger); else None."""
    if not numbers_runs(logger):
        return None
    version = logger.version
    return version if isinstance(version, int | str) else None


def set_logger_version(logger: Any, version: int | str) -> None:
    """Let a logger that numbers its runs by directories write to this one from now on."""
    if numbers_runs(logger) and logger._version != version:
        logger._version = version
        logger._experiment = None


def close_logger(logger: Any) -> None:
    """Another replica writes from now on: bring to disk what is here, and forget what is open.

    Relies on `_experiment` being where the loggers with directories keep their writer.
    """
    if getattr(logger, "_experiment", None) is None or not numbers_runs(logger):
        return
    logger.save()
    close = getattr(logger._experiment, "close", None)
    if close is not None:
        close()
    logger._experiment = None


def continue_logger(tree: str, logger: Any) -> None:
    """This replica writes from now on, after what is there.

    Relies on CSVLogger's ExperimentWriter deleting an existing metrics file in `_check_log_dir_exists`, knowing the
    header's columns from `metrics_keys`, and writing `hparams` (which only the first leader was given) at each save. A
    TensorBoardLogger adds a file to the directory by itself.
    """
    if not isinstance(logger, part(tree, "loggers.csv_logs.CSVLogger")) or logger._experiment is not None:
        return
    writer = part(tree, "loggers.csv_logs.ExperimentWriter")

    def header(self: Any) -> set[str]:
        if not self.metrics_keys and self._fs.isfile(self.metrics_file_path):
            with self._fs.open(self.metrics_file_path, "r", newline="") as file:
                self.metrics_keys = next(csv.reader(file), [])
        keys: set[str] = writer._record_new_keys(self)
        return keys

    def save(self: Any) -> None:
        if self.hparams or not self._fs.isfile(os.path.join(self.log_dir, self.NAME_HPARAMS_FILE)):
            writer.save(self)
        else:
            super(writer, self).save()  # the metrics

    continuing = type("ContinuingWriter", (writer,), {
        "_check_log_dir_exists": lambda _: None, "_record_new_keys": header, "save": save,
        "__doc__": "Appends to what is there.",
    })  # fmt: skip
    logger._experiment = continuing(log_dir=logger.log_dir)


def write_beginning(tree: str, trainer: Trainer) -> None:
    """A new leader writes what the first one should have written at its start, if it is not there.

    On one rank of the group only, so nothing here may be a collective: `trainer.log_dir` and
    `SaveConfigCallback.setup` are. Relies on what the latter does besides, on `_log_hyperparams`, and on the loggers
    with directories writing hyper-parameters to hparams.yaml.
    """
    for logger in trainer.loggers:
        if numbers_runs(logger) and not os.path.exists(os.path.join(logger.log_dir, "hparams.yaml")):
            importlib.import_module(f"{tree}.loggers.utilities")
            part(tree, "trainer.trainer._log_hyperparams")(trainer)
            break
    for callback in _config_callbacks(tree, trainer):
        folder = trainer.default_root_dir
        if trainer.loggers:
            folder = getattr(trainer.loggers[0], "log_dir", None) or trainer.loggers[0].save_dir or folder
        path = os.path.join(folder, callback.config_filename)
        if callback.save_to_log_dir and not callback.already_saved and not os.path.exists(path):
            os.makedirs(folder, exist_ok=True)
            options = {"skip_none": False, "overwrite": callback.overwrite, "multifile": callback.multifile}
            callback.parser.save(callback.config, path, **options)
            callback.save_config(trainer, trainer.lightning_module, "fit")
        callback.already_saved = True


def allow_existing_config(tree: str, trainer: Trainer) -> None:
    """A replica that is started again finds the config.yaml of its predecessor: that is no previous run."""
    for callback in _config_callbacks(tree, trainer):
        callback.overwrite = True


def _config_callbacks(tree: str, trainer: Trainer) -> list[Any]:
    cli = sys.modules.get(f"{tree}.cli")
    return [] if cli is None else [c for c in trainer.callbacks if isinstance(c, cli.SaveConfigCallback)]


SAVED = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
"""Attributes of ModelCheckpoint that are state and not in its `state_dict()`."""


def checkpoint_callbacks(tree: str, trainer: Trainer) -> list[Any]:
    """Every ModelCheckpoint (and subclass) of the Trainer."""
    kind = part(tree, "callbacks.ModelCheckpoint")
    return [callback for callback in trainer.callbacks if isinstance(callback, kind)]


def checkpoint_state(callback: Any) -> dict[str, Any]:
    """All of a ModelCheckpoint that decides what it saves and removes next."""
    state: dict[str, Any] = callback.state_dict()
    return state | {name: getattr(callback, name) for name in SAVED if hasattr(callback, name)}


def set_checkpoint_state(callback: Any, state: dict[str, Any]) -> None:
    """Load what `checkpoint_state` returned on another replica."""
    for name in SAVED:
        if name in state:
            setattr(callback, name, state.pop(name))
    callback.dirpath = state["dirpath"]
    callback.load_state_dict(state)
    callback.current_score = state["current_score"]


def clock(callback: Any, *, runs: bool) -> None:
    """ModelCheckpoint(train_time_interval=...) goes by the leader's clock; None keeps it from saving on the others.

    Relies on `_last_time_checked` and on `_train_time_interval`.
    """
    if getattr(callback, "_train_time_interval", None) is not None:
        now = callback._last_time_checked if runs else None
        callback._last_time_checked = time.monotonic() if runs and now is None else now


def listing(callback: Any) -> list[str]:
    """Paths of the checkpoints in a ModelCheckpoint's folder, as the callback would name them."""
    files, folder = callback._fs, callback.dirpath
    if folder is None or not files.exists(folder):
        return []
    names = (os.path.basename(path) for path in files.ls(folder, detail=False))
    return [os.path.join(folder, name) for name in names if name.endswith(callback.FILE_EXTENSION)]


def writes_one_file(io: Any, path: object) -> bool:
    """`io` writes a checkpoint as one local file, at `path` and when it says so: Lightning's own one, or a subclass."""
    own = any(kind.__name__ == "TorchCheckpointIO" for kind in type(io).__mro__)
    return own and "://" not in os.fspath(path)  # type: ignore[call-overload]


def interrupted(trainer: Trainer) -> bool:
    """`fit` ends with an exception: Lightning calls the callbacks' `on_exception`, which may save, before all else."""
    return bool(trainer.state.status == "interrupted")


def link(target: str, at: str) -> None:
    """A link to a checkpoint, as `ModelCheckpoint._link_checkpoint` makes it for `save_last="link"`."""
    if os.path.islink(at) or os.path.isfile(at):
        os.remove(at)
    elif os.path.isdir(at):
        shutil.rmtree(at)
    try:
        os.symlink(os.path.relpath(target, os.path.dirname(at)), at)
    except OSError:  # a file system without links
        shutil.copy(target, at)


def progress_bar(trainer: Trainer, *, shown: bool) -> None:
    """Show the progress bar on this replica from now on, or no longer.

    Relies on the bars being drawn from `on_train_start` on, which came before this replica was to show one.
    """
    bar = trainer.progress_bar_callback
    if bar is None or trainer.sanity_checking or not trainer.training:
        return
    module = trainer.lightning_module
    if shown:
        bar.enable()
        bar.on_train_start(trainer, module)
        bar.on_train_epoch_start(trainer, module)
    else:
        if (drawn := getattr(bar, "_train_progress_bar", None)) is not None:
            drawn.disable = True  # tqdm: else it would print its last line, which is stale
        bar.on_train_end(trainer, module)
        bar.disable()


def progress_for_logs(tree: str, trainer: Trainer) -> None:
    """Where the output is no terminal, show progress with tqdm: rich would print its bar once, at the end.

    Before the callbacks are set up. Relies on `trainer.callbacks` being the list that all hooks are called from.
    """
    bar = trainer.progress_bar_callback
    if type(bar) is not part(tree, "callbacks.RichProgressBar") or sys.stdout.isatty():
        return
    plain = part(tree, "callbacks.TQDMProgressBar")(refresh_rate=bar.refresh_rate)
    if bar.is_disabled:
        plain.disable()
    trainer.callbacks[trainer.callbacks.index(bar)] = plain


# ---------------------------------------------------------------------- checkpoints (resume.py)


class NoCheckpoint(dict[str, Any]):
    """Stands for the checkpoint where the file is missing. False: the connector skips all it would restore from it."""

    def __bool__(self) -> bool:
        """Relies on every restore function of `_CheckpointConnector` asking `if not self._loaded_checkpoint`."""
        return False


def no_checkpoint(tree: str) -> NoCheckpoint:
    """Relies on the migration of checkpoints looking at the version first."""
    return NoCheckpoint({"pytorch-lightning_version": importlib.import_module(tree).__version__})


# ---------------------------------------------------------------------- the end (stopping.py)


def own_sigterm(kind: type) -> None:
    """Let SIGTERM be the Manager's alone: `kind` is the class of its handler.

    Relies on `_SignalConnector` composing its handler with those from before (`_HandlersCompose.signal_handlers`). Its
    own one raises SIGTERMException after the batch, and in groups of several ranks it runs a collective in the handler.
    """
    composed = signal.getsignal(signal.SIGTERM)
    for handler in getattr(composed, "signal_handlers", ()):
        if isinstance(handler, kind) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # type: ignore[arg-type]
