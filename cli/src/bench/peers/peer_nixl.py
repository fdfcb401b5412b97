"""NIXL: WRITEs of prepared descriptor lists from one DRAM pool into another, over UCX.

Which transports UCX may use is said in the environment (UCX_TLS). No progress thread: on a machine
of few cores it competes with what is measured. Each side polls while it is its turn.
"""

import base64
import time

import harness

MODULES = ["nixl._api", "nixl_cu12._api", "nixl_cu13._api"]
PACKAGES = ["nixl", "nixl-cu12", "nixl-cu13"]
END = b"end"


def agent(api, name, pool):
    it = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    it.register_memory([(pool.address, pool.size, 0, "")], "DRAM")
    return it


def text(metadata):
    return base64.b64encode(metadata).decode()


def notified(it):
    """The messages that have come."""
    return [message for messages in it.get_new_notifs().values() for message in messages]


def target(size):
    (api,) = harness.imports(MODULES)
    pool = harness.Pool(size, filled=False)
    it = agent(api, "target", pool)
    row = {}

    def carry_out(ask):
        what = ask["ask"]
        if what == "meet":
            it.add_remote_agent(base64.b64decode(ask["metadata"]))
        elif what == "row":
            row.update(ask)
        elif what == "clear":
            harness.clear(pool, row, ask["seed"], ask["pages"])
        elif what == "check":
            return {"bytes": harness.check(pool, row, ask["seed"], ask["pages"])}
        elif what == "watch":
            # NIXL moves nothing here unless it is polled.
            left = ask["notifications"]
            while left:
                for message in harness.until("a notification", lambda: notified(it)):
                    left -= 1
                    if message != END:
                        it.send_notif("initiator", b"ack")
            # Acknowledgements leave by polling, too.
            for _ in range(64):
                it.get_new_notifs()
        return {}

    return {"metadata": text(it.get_agent_metadata()), "address": pool.address}, carry_out


def initiator(size):
    numpy, api = harness.imports(["numpy"], MODULES)
    pool = harness.Pool(size, filled=True)
    it = agent(api, "initiator", pool)
    peer = harness.Target(__file__, size)
    name = it.add_remote_agent(base64.b64decode(peer.hello["metadata"]))
    name = name.decode() if isinstance(name, bytes) else name
    peer.ask(ask="meet", metadata=text(it.get_agent_metadata()))
    row, lists = {}, []

    def descriptors(address):
        blocks = row["pool_blocks"]
        table = numpy.zeros((blocks, 3), dtype=numpy.uint64)
        table[:, 0] = address + numpy.arange(blocks, dtype=numpy.uint64) * row["page_bytes"]
        table[:, 1] = row["page_bytes"]
        return table

    def new_row(ask):
        for each in lists:
            each.release()
        row.update(ask)
        lists[:] = [
            it.prep_xfer_dlist("NIXL_INIT_AGENT", descriptors(pool.address), "DRAM"),
            it.prep_xfer_dlist(name, descriptors(peer.hello["address"]), "DRAM"),
        ]
        return peer.ask(**ask)

    def drawn(ask):
        draw = harness.draw(row, ask["seed"], ask["pages"])
        return [numpy.array(blocks, dtype=numpy.int32) for blocks in draw]

    def request(source, to, message):
        return it.make_prepped_xfer("WRITE", lists[0], source, lists[1], to, message)

    def finish(handle, state):
        def done():
            nonlocal state
            if state == "PROC":
                state = it.check_xfer_state(handle)
            return state != "PROC"

        harness.until("the end of a transfer", done)
        if state != "DONE":
            raise RuntimeError(f"a transfer ended as {state}")

    def run(ask):
        source, to = drawn(ask)
        peer.say(ask="watch", notifications=1)
        begun = time.perf_counter()
        handle = request(source, to, END)
        prepared = time.perf_counter()
        state = it.transfer(handle)
        posted = time.perf_counter()
        finish(handle, state)
        done = time.perf_counter()
        it.release_xfer_handle(handle)
        peer.hear()
        return {
            "prep_us": (prepared - begun) * 1e6,
            "post_us": (posted - prepared) * 1e6,
            "tx_us": (done - prepared) * 1e6,
        }

    def trips(ask):
        source, to = drawn(ask)
        one = range(len(source))
        handles = [request(source[i : i + 1], to[i : i + 1], b"page") for i in one]
        peer.say(ask="watch", notifications=len(handles))
        pause = ask["idle_us"] / 1e6
        trips, acked = [], []
        for handle in handles:
            if pause:
                time.sleep(pause)
            begun = time.perf_counter()
            finish(handle, it.transfer(handle))
            trips.append((time.perf_counter() - begun) * 1e6)
            harness.until("an acknowledgement", lambda: notified(it))
            acked.append((time.perf_counter() - begun) * 1e6)
        for handle in handles:
            it.release_xfer_handle(handle)
        peer.hear()
        return {"trips_us": trips, "notified_us": acked}

    def carry_out(ask):
        own = {"row": new_row, "run": run, "trips": trips}
        return own.get(ask["ask"], lambda ask: peer.ask(**ask))(ask)

    return {"version": harness.version(PACKAGES)}, carry_out


if __name__ == "__main__":
    harness.main(initiator, target)
