#!/usr/bin/env python3
"""Writes an invoice and its event in one transaction. Needs Debian's python3-psycopg2."""
import os
import sys

import psycopg2
from psycopg2.extras import Json

number, total = sys.argv[1], int(sys.argv[2])
db = psycopg2.connect(os.environ["POSTHASTE_POSTGRES_URL"])
with db, db.cursor() as tx:  # commits, or rolls back on an exception
    tx.execute("INSERT INTO invoice (number, total) VALUES (%s, %s)", (number, total))
    tx.execute(
        "SELECT outbox_publish('invoice', %s, 'invoice.sent', %s, %s)",
        (number, Json({"number": number, "total": total}), Json({"tenant": "acme"})),
    )
    print(tx.fetchone()[0])  # the event's id
