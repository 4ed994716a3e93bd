// Package inbox makes a handler's effect in Postgres happen exactly once per event and consumer group.
//
//	func handle(ctx context.Context, ev consumer.Event) error {
//		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
//			first, err := inbox.Once(ctx, tx, "mailer", ev.ID)
//			if err != nil || !first {
//				return err
//			}
//			_, err = tx.Exec(ctx, "INSERT INTO mail …")
//			return err
//		})
//	}
//
// The note that the event was seen is written by the transaction that has the effect. An event that is delivered again,
// after a crash between the commit and the acknowledgement or because two processes have it at once, finds the note
// and does nothing. A transaction that rolls back takes its note with it.
//
// Effects outside the transaction (an HTTP call, a mail) are not covered; give the other side the event id to
// deduplicate by. The promise lasts as long as the notes are kept: see Keep.
package inbox
