// Writes an invoice and its event in one transaction. Needs npm's pg.
import pg from 'pg';

const [number, total] = [process.argv[2], Number(process.argv[3])];
const db = new pg.Client(process.env.POSTHASTE_POSTGRES_URL);
await db.connect();
try {
  await db.query('BEGIN');
  await db.query('INSERT INTO invoice (number, total) VALUES ($1, $2)', [number, total]);
  const { rows } = await db.query(
    "SELECT outbox_publish('invoice', $1, 'invoice.sent', $2, $3) AS id",
    [number, JSON.stringify({ number, total }), JSON.stringify({ tenant: 'acme' })],
  );
  await db.query('COMMIT');
  console.log(rows[0].id); // the event's id
} finally {
  await db.end(); // without COMMIT: rolls back
}
