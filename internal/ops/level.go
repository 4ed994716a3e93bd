package ops

// Level is how bad something is. Levels are ordered: a higher one is worse.
type Level int

// All levels there are. Terminal and page have fewer words, so that an operator needs to know three of them; see Word
// and Tone.
const (
	// Unknown is the level of what has not been looked at.
	Unknown Level = iota
	// OK needs nothing.
	OK
	// Degraded still works, but not as it should.
	Degraded
	// Failing does not work, or needs a person, and no event waits for it that could go on otherwise.
	Failing
	// Broken means that events are late, or lost, or cannot flow.
	Broken
)

// levels has the words for each level.
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

// Ready reports whether a process in which this is the worst counts as ready.
func (l Level) Ready() bool { return l < Failing }
