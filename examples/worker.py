"""A whole Posthouse worker in Python: register, heartbeat, claim, settle. Needs psycopg 3, DATABASE_URL and a supervisor.

The main thread claims and settles, handlers run in a pool, and a thread with a connection of its own sends heartbeats, so
that no busy handler costs the lease. After SIGTERM, what does not finish in five seconds is given back, uncharged.
"""
import json, os, signal, threading, time, uuid
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
import psycopg, psycopg.rows

HANDLERS = {"shout": lambda payload, cancelled: {"text": payload["text"].upper()},  # an exception means retry
            "nap": lambda payload, cancelled: {"woken": cancelled.wait(payload["seconds"])}}
URL, SLOTS, LEASE = os.environ["DATABASE_URL"], 8, float(os.environ.get("POSTHOUSE_LEASE_MS", "30000")) / 1000
WORKER = uuid.uuid4()  # one incarnation, one id, never used again
local, stop, held, mark, lease_end = threading.local(), threading.Event(), {}, 0, time.monotonic() + LEASE

def call(function, *arguments):
    """Call a function of Posthouse. Each may be repeated when a connection broke: claims by number, settles by fence."""
    while time.monotonic() < lease_end:
        try:
            if getattr(local, "db", None) is None or local.db.closed:
                local.db = psycopg.connect(URL, autocommit=True, row_factory=psycopg.rows.namedtuple_row)
            return local.db.execute(f"select * from posthouse.{function}", arguments).fetchall()
        except psycopg.OperationalError as error:
            print("posthouse:", error, flush=True)
            time.sleep(0.5)
    os._exit(70)  # the lease is over: others may run our jobs by now

def run(attempt):
    try:
        result = HANDLERS[attempt.job.kind](attempt.job.payload, attempt.cancelled)
        outcome = {"outcome": "cancelled"} if attempt.cancelled.is_set() else {"outcome": "done", "result": result}
        attempt.outcome = json.loads(json.dumps(outcome, allow_nan=False))
    except Exception as error:
        attempt.outcome = {"outcome": "retry", "error": {"class": type(error).__name__, "message": str(error)}}

def settle(attempts):
    outcomes = [{"id": a.job.id, "fence": a.job.fence, **(a.outcome or {"outcome": "release"})} for a in attempts]
    outcomes and call("settle(%s, %s::json)", WORKER, json.dumps(outcomes))
    for attempt in attempts:
        del held[attempt.job.id]

def heartbeats(mismatch=False):
    """Renew the lease, say what we hold, hear what to cancel. After a mismatch, lists say which jobs those are."""
    global lease_end
    while True:
        began, upto = time.monotonic(), mark
        jobs = [attempt for attempt in list(held.values()) if attempt.claim <= upto]
        ids, fences = [attempt.job.id for attempt in jobs], [attempt.job.fence for attempt in jobs]
        answer = call("heartbeat(%s, %s, %s, %s, %s, %s, %s::bigint[], %s::bigint[])", WORKER, upto,
                      min([attempt.claim for attempt in jobs], default=upto + 1), len(ids), sum(ids), sum(fences),
                      *((ids, fences) if mismatch else (None, None)))
        mismatch, lease_end = (answer[0].mismatch, began + LEASE) if answer else (True, 0)  # no row: it is over
        for attempt in jobs if answer else []:
            attempt.job.id in answer[0].cancel + answer[0].lost and attempt.cancelled.set()
        time.sleep(0 if mismatch else LEASE / 4)

def work():
    global mark
    pool, lane, grace = ThreadPoolExecutor(SLOTS), 0, None
    while not stop.is_set() or (held and time.monotonic() < (grace := grace or time.monotonic() + 5)):
        settle([attempt for attempt in held.values() if attempt.outcome])
        free = 0 if stop.is_set() else SLOTS - len(held)
        jobs = call("claim(%s, %s, %s, %s)", WORKER, mark + 1, free, lane) if free else []
        for job in jobs:
            attempt = SimpleNamespace(job=job, claim=mark + 1, cancelled=threading.Event(), outcome=None)
            lane, held[job.id] = job.lane, attempt
            pool.submit(run, attempt)
        mark += 1 if free else 0  # after they are held, lest a heartbeat says that we dropped them
        time.sleep(0 if jobs else 0.1)
    settle(list(held.values()))
    call("retire_worker(%s)", WORKER)
    os._exit(0)

if __name__ == "__main__":
    call("register_worker(%s, %s, %s, %s, %s)", WORKER, ["default"], list(HANDLERS), SLOTS, int(LEASE * 1000))
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    threading.Thread(target=heartbeats, daemon=True).start()
    work()
