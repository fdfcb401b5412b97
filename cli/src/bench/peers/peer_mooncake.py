"""Mooncake's transfer engine: batches of synchronous writes over its TCP transport.

Addresses are exchanged between the two processes themselves (P2PHANDSHAKE), so no metadata service
runs. Its calls block until the pages are written, so posting and moving are one figure.
"""

import os
import time

import harness

# By default a batch of more than 1024 pages is refused.
os.environ.setdefault("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535")
os.environ.setdefault("MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER", "65535")
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
os.environ.setdefault("GLOG_minloglevel", "1")

PACKAGES = ["mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"]
HOST = "127.0.0.1"


def engine(pool):
    (module,) = harness.imports(["mooncake.engine"])
    it = module.TransferEngine()
    good(it.initialize(HOST, "P2PHANDSHAKE", "tcp", ""), "initialize")
    good(it.register_memory(pool.address, pool.size), "register_memory")
    return it


def good(code, what):
    if code != 0:
        raise RuntimeError(f"{what} gave {code}")


def target(size):
    pool = harness.Pool(size, filled=False)
    it = engine(pool)
    row = {}

    def carry_out(ask):
        what = ask["ask"]
        if what == "row":
            row.update(ask)
        elif what == "clear":
            harness.clear(pool, row, ask["seed"], ask["pages"])
        elif what == "check":
            return {"bytes": harness.check(pool, row, ask["seed"], ask["pages"])}
        return {}

    # The engine serves as long as it is held.
    carry_out.engine = it
    return {"session": f"{HOST}:{it.get_rpc_port()}", "address": pool.address}, carry_out


def initiator(size):
    pool = harness.Pool(size, filled=True)
    it = engine(pool)
    peer = harness.Target(__file__, size)
    session, there = peer.hello["session"], peer.hello["address"]
    row = {}

    def new_row(ask):
        row.update(ask)
        return peer.ask(**ask)

    def run(ask):
        source, to = harness.draw(row, ask["seed"], ask["pages"])
        page = row["page_bytes"]
        begun = time.perf_counter()
        source = [pool.address + block * page for block in source]
        to = [there + block * page for block in to]
        lengths = [page] * len(to)
        prepared = time.perf_counter()
        code = it.batch_transfer_sync_write(session, source, to, lengths)
        done = time.perf_counter()
        good(code, "batch_transfer_sync_write")
        return {"prep_us": (prepared - begun) * 1e6, "tx_us": (done - prepared) * 1e6}

    def trips(ask):
        page, pause = row["page_bytes"], ask["idle_us"] / 1e6
        trips = []
        for source, to in zip(*harness.draw(row, ask["seed"], ask["pages"])):
            source, to = pool.address + source * page, there + to * page
            if pause:
                time.sleep(pause)
            begun = time.perf_counter()
            code = it.transfer_sync_write(session, source, to, page)
            trips.append((time.perf_counter() - begun) * 1e6)
            good(code, "transfer_sync_write")
        return {"trips_us": trips}

    def carry_out(ask):
        own = {"row": new_row, "run": run, "trips": trips}
        return own.get(ask["ask"], lambda ask: peer.ask(**ask))(ask)

    return {"version": harness.version(PACKAGES)}, carry_out


if __name__ == "__main__":
    harness.main(initiator, target)
