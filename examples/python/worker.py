#!/usr/bin/env python3
"""Reads invoices' events as consumer group "mailer" and writes a mail for each, once.

Needs Redis 7 and Debian's python3-psycopg2 and python3-redis. Any number of these processes share the work.
"""
import json
import os
import sys
import time
from datetime import datetime, timezone

import psycopg2
import redis

STREAM, GROUP, CONSUMER = "outbox.invoice", "mailer", f"python-{os.getpid()}"
IDLE = int(os.environ.get("CLAIM_IDLE_MS", "15000"))  # longer than any event takes
ATTEMPTS = 5
cursors = {}  # where each stream's pending entries are searched next

r = redis.Redis.from_url(os.environ["POSTHASTE_REDIS_URL"], decode_responses=True)


def connect():
    """Returns a connection to Postgres, however long that takes: an outage is no fault of an event."""
    while True:
        try:
            return psycopg2.connect(os.environ["POSTHASTE_POSTGRES_URL"])
        except psycopg2.OperationalError as err:
            print(f"postgres: {err}", file=sys.stderr, flush=True)
            time.sleep(1)


db = connect()


def handle(event):
    """The effect of an event. The record of inbox_once commits with it, or rolls back with it."""
    with db, db.cursor() as tx:
        tx.execute("SELECT inbox_once(%s, %s)", (GROUP, event["id"]))
        if tx.fetchone()[0]:
            invoice = json.loads(event["data"])
            tx.execute("INSERT INTO mail (invoice, total) VALUES (%s, %s)", (invoice["number"], invoice["total"]))


def streams():
    """The type's stream, and those that it is spread over. Each has the group."""
    names = [STREAM]
    if r.exists(STREAM + "#sharded"):
        names += [name for n in range(16) if r.exists(name := f"{STREAM}.{n}")]
    for name in names:
        try:
            r.xgroup_create(name, GROUP, id="0", mkstream=True)  # from the first entry on
        except redis.ResponseError as err:
            if not str(err).startswith("BUSYGROUP"):
                raise
    return names


def claimed(name):
    """Takes over an entry that failed, or whose process ended."""
    reply = r.execute_command("XAUTOCLAIM", name, GROUP, CONSUMER, IDLE, cursors.get(name, "0"), "COUNT", 1)
    cursors[name], entries, trimmed = reply
    for entry in trimmed:
        print(f"{name} {entry}: trimmed before it was handled", file=sys.stderr, flush=True)
    return entries


def work(name, entry, event):
    global db
    while event.get("for_group", GROUP) == GROUP:  # otherwise: added again for another group
        try:
            handle(event)
            break
        except Exception as err:
            if db.closed:  # the connection was lost: the same event, on a new one
                db = connect()
                continue
            print(f"{name} {entry}: {err}", file=sys.stderr, flush=True)
            tries = r.xpending_range(name, GROUP, entry, entry, 1)
            if tries and tries[0]["times_delivered"] >= ATTEMPTS:
                bury(name, entry, event, err, tries[0]["times_delivered"])
            return  # otherwise it stays pending, and is claimed after IDLE
    r.xack(name, GROUP, entry)


def bury(name, entry, event, err, attempts):
    """Moves an event to the dead stream, with the fields that `posthaste dead` reads."""
    dead = {k: v for k, v in event.items() if not k.startswith("dead_")} | {
        "dead_stream": name, "dead_entry": entry, "dead_group": GROUP, "dead_error": str(err)[:1000],
        "dead_attempts": attempts, "dead_at": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
    }
    with r.pipeline(transaction=True) as both:
        both.xadd("dead." + name, dead)  # in a cluster: "dead.{" + name + "}"
        both.xack(name, GROUP, entry)
        both.execute()


while True:
    try:
        names = streams()
        for name in names:
            for entry, event in claimed(name):
                work(name, entry, event)
        # One entry at a time: those that wait in this process would be idle, and be claimed by another one.
        for name, entries in r.xreadgroup(GROUP, CONSUMER, {n: ">" for n in names}, count=1, block=IDLE // 3):
            for entry, event in entries:
                work(name, entry, event)
    except redis.RedisError as err:
        print(f"redis: {err}", file=sys.stderr, flush=True)
        time.sleep(1)
