package console

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"posthaste/internal/testenv"
)

// A process that was suspended during a read measures a long duration; the next read must not wait for hours. After one
// slow read the next must follow soon, because Redis may fail at any moment.
func TestARestIsBounded(t *testing.T) {
	t.Parallel()
	s := source[int]{every: time.Second}
	for _, c := range []struct{ took, before, want time.Duration }{
		{0, 0, time.Second},
		{500 * time.Millisecond, 500 * time.Millisecond, 4500 * time.Millisecond},
		{500 * time.Millisecond, time.Hour, 4500 * time.Millisecond},
		{time.Hour, 2 * time.Hour, longestGap},
		{time.Hour, time.Millisecond, time.Second},
		{time.Millisecond, time.Hour, time.Second},
	} {
		testenv.Equal(t, fmt.Sprintf("after %v and %v", c.before, c.took), s.rest(c.took, c.before), c.want)
	}
}

// A page that is opened now must not start with a result from an hour ago.
func TestAnOldLookIsNone(t *testing.T) {
	t.Parallel()
	s := source[int]{read: func(context.Context) (int, error) { return 7, nil }}
	s.fresh(t.Context())
	if l := s.look(); l.AsOf == nil || l.Value != 7 {
		t.Errorf("fresh: %+v", l)
	}
	s.looked, s.asOf = s.looked.Add(-time.Hour), s.asOf.Add(-time.Hour)
	if l := s.look(); l.AsOf != nil || l.Value != 0 {
		t.Errorf("an hour later: %+v", l)
	}
	s.read = func(context.Context) (int, error) { return 8, partial{errors.New("one is missing")} }
	s.fresh(t.Context())
	if l := s.look(); l.AsOf == nil || l.Value != 8 || l.Error == "" || time.Since(*l.Since) > time.Minute {
		t.Errorf("a part of it: %+v", l)
	}
}

// Pages share reads: between two, every passes, unless a caller needs one that began after its call.
func TestReadsAreShared(t *testing.T) {
	t.Parallel()
	reads := 0
	s := source[int]{every: time.Hour, read: func(context.Context) (int, error) { reads++; return reads, nil }}
	for i, read := range []func(context.Context){s.refresh, s.refresh, s.fresh, s.refresh} {
		read(t.Context())
		testenv.Equal(t, fmt.Sprintf("reads after call %d", i), reads, 1+i/2)
	}
}
