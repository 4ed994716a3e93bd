package ops

// Level is the severity of a problem. A higher level is worse.
type Level int

// All levels. Terminal and page have fewer words, so that an operator needs to know only three; see Word and Tone.
const (
	// Unknown means that it was not checked.
	Unknown Level = iota
	// OK needs no action.
	OK
	// Degraded still works, but not as it should.
	Degraded
	// Failing does not work, or needs an operator, but delays no event.
	Failing
	// Broken means that events are late, or lost, or cannot flow.
	Broken
)

var levels = [...]struct{ word, tone string }{
	Unknown:  {"unknown", "unknown"},
	OK:       {"ok", "ok"},
	Degraded: {"degraded", "warn"},
	Failing:  {"degraded", "bad"},
	Broken:   {"broken", "bad"},
}

// Word is the level in a terminal and in JSON for scripts: "ok", "degraded", "broken" or "unknown".
func (l Level) Word() string { return levels[l].word }

// Tone is the level as a page colours it: "ok", "warn", "bad" or "unknown".
func (l Level) Tone() string { return levels[l].tone }

// Ready reports whether a process whose worst problem has this level counts as ready.
func (l Level) Ready() bool { return l < Failing }
