package idem_test

import (
	"context"
	"fmt"

	"posthaste/idem"
)

// Without Redis the guard lets every request through to the database, whose unique index arbitrates.
func Example() {
	guard := idem.New(idem.Options{Routes: []string{"/orders"}}) // Redis: client from idem.NewClient
	d, err := guard.Begin(context.Background(), idem.Request{
		Key:         idem.NewKey("user 7", "POST", "/orders", "the client's key"),
		Fingerprint: idem.NewFingerprint(1, "order", "1250", "USD"),
		Route:       "/orders",
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	switch d.Outcome {
	case idem.Replay:
		fmt.Println("answer again:", d.Record.Ref)
	case idem.Busy:
		fmt.Println("409, come back in", d.RetryAfter)
	case idem.Mismatch:
		fmt.Println("422, another command has this key")
	case idem.Proceed:
		fmt.Println("do the work; degraded:", d.Ticket.Degraded())
		// INSERT … ON CONFLICT (user_id, idem_key) DO NOTHING, COMMIT, and then:
		d.Ticket.Commit(context.Background(), idem.Record{Status: 201, Ref: "order 1"})
	}
	// Output: do the work; degraded: true
}
