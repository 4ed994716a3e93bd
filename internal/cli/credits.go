package cli

import (
	"fmt"
	"time"

	"posthaste/credits"
)

// Reconciliation prints the comparison of the balances.
func (o IO) Reconciliation(r *credits.Report) error {
	fmt.Fprintf(o.Stdout, "%d accounts, %d credits in the ledger; %d in Redis, %d of them ahead of the ledger by what "+
		"is in the streams; %d differences\n", r.Accounts, r.Total, r.Cached, r.Pending,
		len(r.Differences)+len(r.Buckets))
	for _, b := range r.Buckets {
		fmt.Fprintf(o.Stdout, "bucket %d: its accounts add up to %d, its counter-account says %d: accounts were "+
			"changed or deleted by hand (%s)\n", b.Bucket, b.Accounts, b.Issued, b.Cause)
	}
	if len(r.Differences) == 0 {
		return nil
	}
	return List(o, false, r.Differences, "", "USER\tENTRIES\tLEDGER\tREDIS\tCAUSE\tEXPLANATION",
		func(d credits.Difference) []any {
			inRedis := "-"
			if d.Redis != nil {
				inRedis = fmt.Sprint(*d.Redis)
			}
			return []any{d.UserID, d.Entries, d.Ledger, inRedis, d.Cause, d.Explanation}
		})
}

// Accounts returns a function that prints the progress of a long reconciliation.
func (o IO) Accounts() func(done, about int64) {
	const every = 5 * time.Second
	told := time.Now()
	return func(done, about int64) {
		if time.Since(told) >= every {
			told = time.Now()
			fmt.Fprintf(o.Stderr, "%d of about %d accounts\n", done, about)
		}
	}
}

// AccountLines describes an account.
func AccountLines(a *credits.Account) (lines []string) {
	say := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	say("ledger: %d credits after operation %d", a.Ledger, a.Seq)
	if a.Redis != nil {
		say("redis:  %d credits after operation %d, %d waiting for the ledger", *a.Redis, *a.RedisSeq, a.Waiting)
	} else {
		say("redis:  not loaded; it is loaded from the ledger on demand")
	}
	if a.Difference != "" {
		say("difference: %s", a.Difference)
	}
	switch {
	case a.Frozen != "":
		say("frozen: %s; %d operations in quarantine", a.Frozen, a.Quarantined)
	case a.RedisFrozen != "":
		say("frozen in Redis only: %s", a.RedisFrozen)
	}
	for _, q := range a.Quarantine {
		say("  %s %q %q, operation %q (%s, %s)", q.At.UTC().Format(time.RFC3339), q.Kind, q.Amount, q.Seq, q.Reason,
			q.StreamID)
	}
	return lines
}
