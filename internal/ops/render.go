package ops

import "strings"

// Brief is the verdict in a terminal, in a log, and for scripts.
type Brief struct {
	// Word is "ok", "degraded", "broken" or "unknown".
	Word string `json:"word"`
	// Why is the gravest problem in one line, Remedy what to do about it.
	Why    string `json:"why"`
	Remedy string `json:"remedy,omitempty"`
	// Also are the other problems, one line each, the gravest first.
	Also []string `json:"also,omitempty"`
}

func (v Verdict) Brief() Brief {
	b := Brief{Word: v.Level.Word(), Why: v.well}
	switch {
	case v.Level == Unknown:
		b.Why = "not everything has been looked at"
	case v.Level > OK:
		b.Why, b.Remedy = v.Problems[0].line(), v.Problems[0].Remedy
		for _, p := range v.Problems[1:min(len(v.Problems), maxAlso+1)] {
			if !p.Follows {
				b.Also = append(b.Also, p.line())
			}
		}
	}
	return b
}

func (p Problem) line() string { return p.Title + ": " + strings.TrimSuffix(p.Why, ".") }

// Report is the status with the verdict on it: the body of GET /relay, and the output of posthaste status --json.
type Report struct {
	Status
	Verdict Brief `json:"verdict"`
}

// Report is the status with the verdict, for scripts.
func (s *Snapshot) Report() Report { return Report{s.Postgres.Status, Assess(s).Brief()} }

// maxAlso bounds the problems that a page shows after the gravest: any writer to Redis can make thousands of groups.
const maxAlso = 20

// Page is the verdict on a page.
type Page struct {
	// PageProblem is the gravest problem, or reports that all is well.
	PageProblem

	// Also are the other problems, the gravest first.
	Also []PageProblem `json:"also"`
	// Parts are the levels of the parts of the picture that are not ok.
	Parts map[string]string `json:"parts"`
}

// PageProblem is a problem on a page.
type PageProblem struct {
	// Level is "unknown", "ok", "warn" or "bad". Part is the part of the picture.
	Level string `json:"level"`
	Part  string `json:"part"`
	Title string `json:"title"`
	Why   string `json:"why"`
	// Remedy is what to do, Action the section of the page where to do it, Runbook the section of the runbook. They
	// may be empty.
	Remedy  string `json:"remedy"`
	Action  string `json:"action"`
	Runbook string `json:"runbook"`
}

func (p Problem) page() PageProblem {
	return PageProblem{p.Level.Tone(), p.Part, p.Title, p.Why, p.Remedy, p.Action, p.Runbook}
}

// Page is the verdict in sentences. It omits problems that follow from others.
func (v Verdict) Page() Page {
	out := Page{Also: []PageProblem{}, Parts: map[string]string{}}
	switch out.Level = v.Level.Tone(); v.Level {
	case Unknown:
		out.Title, out.Why = "Looking…", "Postgres and Redis are being asked."
	case OK:
		out.Title, out.Why = "Nothing is lost, nothing is late", sentence(v.well+"; "+v.waiting)
	case Degraded, Failing, Broken:
		out.PageProblem = v.Problems[0].page()
	}
	for i, p := range v.Problems {
		if p.Follows {
			break // they are the last
		}
		if _, known := out.Parts[p.Part]; !known { // the gravest comes first
			out.Parts[p.Part] = p.Level.Tone()
		}
		if i > 0 {
			out.Also = append(out.Also, p.page())
		}
	}
	if more := len(out.Also) - maxAlso; more > 0 {
		rest := out.Also[maxAlso]
		out.Also = append(out.Also[:maxAlso], PageProblem{
			Level: rest.Level, Title: "And " + CountOf(int64(more), "more problem") + ".", Why: "See the tables below.",
		})
	}
	return out
}
