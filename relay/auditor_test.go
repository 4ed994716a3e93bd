package relay

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"posthaste/outbox"
)

// marks is a Store whose audits a test answers.
type marks struct {
	Audits
	mark outbox.AuditMark
	err  error
}

func (m *marks) Audit(context.Context) (outbox.AuditMark, error) { return m.mark, m.err }

// A stream is stalled if it does not reach a position that was taken before, although the WAL grows. Nothing is found
// without an answer of the table, which is reported from the second time on, nor while the stream is blocked for a
// known reason, which also drops what was taken before.
func TestAudit(t *testing.T) {
	t.Parallel()
	const blocked, silent = -1, -1
	type step struct {
		at     time.Duration
		passed int // or blocked
		wal    int // or silent
		want   string
	}
	for name, steps := range map[string][]step{
		"all is well":        {{0, 100, 100, ""}, {5, 200, 200, ""}, {10, 300, 300, ""}},
		"behind, but moving": {{0, 50, 100, ""}, {5, 90, 200, ""}, {10, 100, 300, ""}, {30, 300, 400, ""}},
		"standing still while the WAL grows": {
			{0, 50, 100, ""}, {5, 50, 110, ""}, {16, 50, 120, outbox.ReasonStalled},
		},
		"standing still, with nothing more to read": {{0, 50, 100, ""}, {16, 50, 99, ""}},
		"reached at the last moment":                {{0, 50, 100, ""}, {16, 100, 120, ""}},
		"without an answer": {
			{0, 50, 100, ""}, {16, 50, silent, ""}, {21, 50, silent, "audit"}, {26, 50, 120, outbox.ReasonStalled},
		},
		"without an answer at first": {{0, 50, silent, ""}, {16, 50, silent, "audit"}, {31, 50, 120, ""}},
		"blocked meanwhile": {
			{0, 50, 100, ""}, {3600, blocked, 200, ""}, {3605, 50, 300, ""}, {3621, 50, 400, outbox.ReasonStalled},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r, m := New(Options{}), &marks{}
				r.health.clear(conditionPostgres)
				a := &auditor{reporter: r.reporter, store: m}
				began := time.Now()
				for i, s := range steps {
					pass(s.at*time.Second - time.Since(began))
					a.progress = func() (outbox.LSN, bool) { return outbox.LSN(max(s.passed, 0)), s.passed != blocked }
					if m.err = nil; s.wal == silent {
						m.err = errRefused
					}
					m.mark.LSN, m.mark.Flushed = outbox.LSN(max(s.wal, 0)), outbox.LSN(max(s.wal, 0))
					got := ""
					if err := a.once(t.Context()); err != nil {
						got = slotReason(err)
					} else if bad, _ := r.health.lists(); len(bad) > 0 {
						got, _, _ = strings.Cut(bad[0], ":")
					}
					if got != s.want {
						t.Fatalf("step %d: got %q, want %q", i, got, s.want)
					}
				}
				stopping, stop := context.WithCancel(t.Context())
				stop()
				a.unanswered = 0
				if a.answered(stopping, errRefused); a.unanswered != 0 {
					t.Error("an audit that was cut short counts as one without an answer")
				}
			})
		})
	}
}
