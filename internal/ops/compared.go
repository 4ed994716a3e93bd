package ops

import (
	"slices"
	"strings"

	"github.com/dustin/go-humanize"

	"posthaste/outbox"
)

// Compared is what the comparison of a stream has found.
type Compared struct {
	outbox.Report
	// Remedy is the command that restores the missing events; "" if none is missing.
	Remedy string `json:"remedy,omitempty"`
}

// Lost describes the missing events, or that Postgres has gone back; "" if none is missing.
func (r Compared) Lost() string {
	switch {
	case r.Missing == 0:
		return ""
	case r.Stream == "":
		return "Postgres has gone back in time, by a failover or a restore"
	case r.Missing < 0:
		return "Redis lost an unknown number of settled events of " + r.Stream
	}
	return "Redis lost " + CountOf(r.Missing, "settled event") + " of " + r.Stream
}

// Found describes the progress, or what was found apart from missing events, in a few words; "" for nothing.
func (r Compared) Found() string {
	if r.Done == nil {
		progress := r.Stream + ": " + humanize.Comma(r.Restored) + " restored so far"
		if r.Expected > 0 {
			progress += ", about " + humanize.Comma(r.Expected) + " to compare"
		}
		return progress
	}
	if r.Restored+r.Recalled+r.Phantoms == 0 {
		return ""
	}
	found := []string{CountOf(r.Restored, "event") + " of " + r.Stream}
	if r.Recalled > 0 {
		found = append(found, humanize.Comma(r.Recalled)+" found there, and not published again")
	}
	if r.Phantoms > 0 {
		found = append(found, CountOf(r.Phantoms, "phantom"))
	}
	return strings.Join(found, ", ")
}

// open returns the reports of streams that are being compared.
func (s *Status) open() []Compared {
	return slices.DeleteFunc(slices.Clone(s.Compared), func(r Compared) bool { return r.Done != nil })
}
