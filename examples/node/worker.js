// Reads invoices' events as consumer group "mailer" and writes a mail for each, once. Needs Redis 7, and npm's pg and
// redis. Any number of these processes share the work.
import { setTimeout as sleep } from 'node:timers/promises';
import pg from 'pg';
import { createClient } from 'redis';

const [STREAM, GROUP, CONSUMER] = ['outbox.invoice', 'mailer', `node-${process.pid}`];
const IDLE = Number(process.env.CLAIM_IDLE_MS ?? 15000); // longer than any event takes
const ATTEMPTS = 5;
const cursors = {}; // where each stream's pending entries are searched next

const r = createClient({ url: process.env.POSTHASTE_REDIS_URL });
r.on('error', (err) => console.error(`redis: ${err.message}`)); // the client connects again by itself
await r.connect();
const pool = new pg.Pool({ connectionString: process.env.POSTHASTE_POSTGRES_URL, max: 1 });
pool.on('error', (err) => console.error(`postgres: ${err.message}`));

// handle is the effect of an event. The record of inbox_once commits with it, or rolls back with it.
async function handle(tx, event) {
  const { rows } = await tx.query('SELECT inbox_once($1, $2) AS first', [GROUP, event.id]);
  if (!rows[0].first) return;
  const invoice = JSON.parse(event.data);
  await tx.query('INSERT INTO mail (invoice, total) VALUES ($1, $2)', [invoice.number, invoice.total]);
}

// once calls handle in a transaction. While Postgres is away it waits: an outage is no fault of an event.
async function once(event) {
  for (;; await sleep(1000)) {
    let tx, lost;
    try {
      tx = await pool.connect();
      tx.on('error', (err) => { lost = err; });
      await tx.query('BEGIN');
      await handle(tx, event);
      await tx.query('COMMIT');
      return;
    } catch (err) {
      if (tx && !lost) await tx.query('ROLLBACK').catch((e) => { lost = e; });
      if (tx && !lost) throw err;
      console.error(`postgres: ${err.message}`);
    } finally {
      tx?.removeAllListeners('error');
      tx?.release(lost);
    }
  }
}

// streams returns the type's stream, and those that it is spread over. Each has the group.
async function streams() {
  const names = [STREAM];
  for (let n = 0; n < 16 && await r.exists(`${STREAM}#sharded`); n++) {
    if (await r.exists(`${STREAM}.${n}`)) names.push(`${STREAM}.${n}`);
  }
  for (const name of names) {
    await r.xGroupCreate(name, GROUP, '0', { MKSTREAM: true }) // from the first entry on
      .catch((err) => { if (!err.message.startsWith('BUSYGROUP')) throw err; });
  }
  return names;
}

async function work(name, { id, message: event }) {
  if ((event.for_group ?? GROUP) === GROUP) { // otherwise: added again for another group
    try {
      await once(event);
    } catch (err) {
      console.error(`${name} ${id}: ${err.message}`);
      const [pending] = await r.xPendingRange(name, GROUP, id, id, 1);
      if (pending?.deliveriesCounter >= ATTEMPTS) await bury(name, id, event, err, pending.deliveriesCounter);
      return; // otherwise it stays pending, and is claimed after IDLE
    }
  }
  await r.xAck(name, GROUP, id);
}

// bury moves an event to the dead stream, with the fields that `posthaste dead` reads.
async function bury(name, id, event, err, attempts) {
  const fields = Object.entries(event).filter(([k]) => !k.startsWith('dead_'));
  await r.multi()
    .xAdd(`dead.${name}`, '*', { // in a cluster: `dead.{${name}}`
      ...Object.fromEntries(fields), dead_stream: name, dead_entry: id, dead_group: GROUP,
      dead_error: err.message.slice(0, 1000), dead_attempts: String(attempts),
      dead_at: new Date().toISOString().replace('Z', '000Z'), // microseconds
    })
    .xAck(name, GROUP, id)
    .exec();
}

for (;;) {
  try {
    const names = await streams();
    for (const name of names) { // takes over an entry that failed, or whose process ended
      const { nextId, messages, deletedMessages } =
        await r.xAutoClaim(name, GROUP, CONSUMER, IDLE, cursors[name] ?? '0', { COUNT: 1 });
      cursors[name] = nextId;
      for (const id of deletedMessages) console.error(`${name} ${id}: trimmed before it was handled`);
      for (const entry of messages) await work(name, entry);
    }
    // One entry at a time: those that wait in this process would be idle, and be claimed by another one.
    const read = await r.xReadGroup(GROUP, CONSUMER, names.map((key) => ({ key, id: '>' })),
      { COUNT: 1, BLOCK: Math.ceil(IDLE / 3) });
    for (const { name, messages } of read ?? []) for (const entry of messages) await work(name, entry);
  } catch (err) {
    console.error(`redis: ${err.message}`);
    await sleep(1000);
  }
}
