"""One vLLM server, as the configuration describes it."""

from pathlib import Path

from dflash.checkpoint import drafter_sha256
from dflash.identity import target_id
from jobs.base.config import Config
from jobs.base.devices import served_dtype
from jobs.base.drafter_folders import local_folder
from jobs.registry.versions import CHAMPION, resolve, served_k
from serving.vllm_server import Server
from store.place import newest_json


def server(cfg: Config, log: str = "serve.log") -> Server:
    """The server that the configuration describes, not started. vLLM prints to the file `log` in
    <scratch>/server_logs.

    Raises ValueError if serve.drafter is champion and there is none.
    """
    serve = cfg.serve
    drafter, name = _drafter(cfg)
    k = serve.k or (best_k(cfg, drafter, name) if drafter else [])
    if drafter and k and not any(k):  # it pays at no batch size
        drafter, name, k = None, None, []
    return Server(
        cfg.target_path,
        drafter=drafter,
        k=tuple(k),
        host=serve.host,
        port=serve.port,
        dtype=str(served_dtype(cfg)).removeprefix("torch."),
        max_model_len=serve.max_model_len,
        max_num_seqs=serve.max_num_seqs,
        kv_cache_gib=serve.kv_cache_gib,
        eager=serve.eager,
        capture=serve.capture or None,
        token_file=serve.token_file or None,
        target_id=target_id(cfg.target_path),
        drafter_version=name,
        drafter_sha256=drafter_sha256(drafter) if drafter else None,
        log=cfg.path("server_logs", log),
        args=tuple(serve.args),
    )


def best_k(cfg: Config, drafter: Path, version: str | None) -> list[int]:
    """The K per batch size that the promotion of a version chose, else that `verify` chose for this
    drafter; [] if neither did.
    """
    registered = cfg.serve.drafter == CHAMPION or cfg.serve.drafter.isdigit()
    chosen = served_k(cfg, version) if registered and version else []
    return chosen or verified_k(cfg, drafter)


def verified_k(cfg: Config, drafter: Path) -> list[int]:
    """The K per batch size that the latest `flywheel verify` chose for this drafter; [] if none."""
    wanted = {"drafter_sha256": drafter_sha256(drafter), "target_id": target_id(cfg.target_path)}
    for found in newest_json(cfg.place("verified"), list(wanted)):
        sound = found.get("ok", True)  # a verify that failed has chosen no K
        if sound and wanted.items() <= found.items() and "k_by_batch_size" in found:
            return found["k_by_batch_size"]
    return []


def _drafter(cfg: Config) -> tuple[Path | None, str | None]:
    """(folder, version) of serve.drafter; (None, None) without one."""
    named = cfg.serve.drafter
    if named != CHAMPION and not named.isdigit():
        if not named:
            return None, None
        folder = local_folder(cfg, named)
        return folder, folder.name
    found = resolve(cfg, named)
    if found is None:
        raise ValueError("there is no champion yet: `flywheel promote`, or name a drafter folder")
    version, folder = found
    return folder, version
