package model

import (
	"math/rand/v2"
	"os"
	"strings"
	"testing"
)

var full = os.Getenv("POSTHASTE_TEST_FULL") != ""

func newMachine(plan, broken string) *machine {
	m := &machine{plan: parsePlan(plan), broken: broken}
	for _, e := range m.plan.events {
		m.parts = max(m.parts, e.part+1)
	}
	return m
}

// plans of the writers: one aggregate or two, in one part or two, in transactions that end in every way.
var plans = []string{
	"A0", "A0 A0~", "A0~ B0", "A0 B1", "A0& A0", "A0? B0~", "A0+B1", "A0+B0 A0", "A0! A0", "A0! B1 R1", "A0 B0? C1",
	"A0 B0# C1",
}

// faults occur while the plan runs.
var faults = []string{
	"", "crash", "lock", "assist", "toggle", "reply", "pgcrash", "pgback", "copy", "rdback", "flush",
	"silent", "slot", "drop", "cure", "hang",
	"crash crash", "assist crash", "pgcrash crash", "toggle lock", "assist toggle", "reply crash", "cure assist",
	"cure lock", "cure pgback", "rdback lock", "flush lock", "rdback crash", "slot pgcrash", "slot lock",
	"silent crash", "copy crash", "pgback rdback", "hang crash", "hang lock", "hang pgcrash", "silent pgcrash",
	"silent lock", "silent hang", "give", "give crash", "give lock", "give assist", "give pgcrash",
}

// Within the bounds, each event is in the stream at most once, in order, and only if it was committed; settled events
// are in the stream. When nothing more happens, everything is in the stream and settled, and no WAL is held back.
// States beyond an exhaustive search are sampled by random walks with fixed seeds.
func TestAMarkSettlesWhatIsInTheStream(t *testing.T) {
	t.Parallel()
	most, walks := 1_000, 50
	if full {
		most, walks = 100_000, 1_000
	}
	for _, b := range faults {
		for _, p := range plans {
			if strings.Contains(b, "copy") && strings.Contains(p, "+") {
				continue // the model renumbers transactions, not rows
			}
			m := newMachine(p, "")
			n, wrong, trace := m.explore(parseBudget(b), most)
			for i := 0; i < walks && wrong == ""; i++ {
				wrong, trace = m.wander(parseBudget(b), rand.New(rand.NewPCG(1, uint64(i))))
			}
			if wrong != "" {
				t.Errorf("%q with %q, after %d states: %s\n\t%s", p, b, n, wrong, strings.Join(trace, "\n\t"))
			}
		}
	}
}

// First steps, by parts of their labels.
const (
	adopted = "polling false; raises; looks"
	writes  = "transaction 1 has its id; writes its rows; commit"
	first   = writes + "; visible"
	second  = first + "; transaction 2 has its id; " + adopted
	copied  = first + "; polling false; the standby has"
	saved   = writes + "; the standby has; Redis is saved; polling false"
	// An older transaction is open, or two, of which the snapshot sees one.
	open2 = "transaction 1 has; transaction 2 has; transaction 2 writes; commit; visible; " + adopted
	open3 = "transaction 1 has; transaction 2 has; transaction 3 has; transaction 3 writes; commit; visible; " + adopted
	// A relay streams, and the first transaction is published.
	streamed  = "; writes a pass; streams; " + writes
	published = adopted + streamed + "; visible; sends; arrives"
	// As before, and a standby that lacks the transaction is promoted, with or without the owner.
	promoted   = streamed + "; sends; arrives; promoted"
	sameOwner  = "polling false; the standby has; raises; looks" + promoted
	otherOwner = "the standby has; " + adopted + promoted
)

// Without any one safeguard there is a violation: the plan, the faults and the first steps that show it.
func TestEverySafeguardOfTheMarkIsNeeded(t *testing.T) {
	t.Parallel()
	for broken, where := range map[string][3]string{
		"a claim inherits doubt":                               {"A0", "assist"},
		"a copy's rows get ids of the server":                  {"A0 A0", "copy", second},
		"a gate that has not been compared is not whole":       {"A0", "pgback rdback", copied},
		"a gate that is new is not whole":                      {"A0", "flush"},
		"a scan goes as far as the mark":                       {"A0 B0 C0", "", open3},
		"a mark moves on evidence":                             {"A0", "silent"},
		"a mark's write checks the claim":                      {"A0", "assist"},
		"a mark's write checks the epoch":                      {"A0", "lock"},
		"a mark's write checks the nonce":                      {"A0 B0", "pgback", otherOwner},
		"a mark's write checks the server":                     {"A0 B0", "pgback", sameOwner},
		"a missed row is noticed":                              {"A0", "silent"},
		"a new slot has a barrier":                             {"A0", "slot"},
		"a park checks the claim":                              {"A0!", "cure assist"},
		"a park checks the epoch":                              {"A0!", "cure lock"},
		"a part is claimed while no write of its mark runs":    {"A0 A0", "hang"},
		"a pass ends in the session that began it":             {"A0~ B0", "pgcrash", adopted},
		"a pass continues where it stopped":                    {"A0", "crash"},
		"a refusal raises the claim":                           {"A0!", "cure assist"},
		"a transaction is done as a whole":                     {"A0+B0", ""},
		"all parts are drained before one mark is made":        {"A0 A0", ""},
		"an undone transaction is left out":                    {"A0 A0", ""},
		"an unknown end of a mark's write is an adoption":      {"A0 A0", "hang"},
		"doubt stays until it is settled":                      {"A0", "crash"},
		"doubt stays until the mark has it":                    {"A0&", "pgback"},
		"evidence and mark are one session":                    {"A0 B0? C0", "pgcrash", published},
		"hi bounds what is settled":                            {"A0 A0", "copy"},
		"marks are per part":                                   {"A0 B1", ""},
		"nothing is published before the stream is whole":      {"A0", "pgback rdback", copied},
		"one mark is made while no write of a part's runs":     {"A0! A0", "hang"},
		"only what is settled is confirmed":                    {"A0", "crash"},
		"retention checks the mark":                            {"A0 A0", "drop"},
		"rows stay in their part":                              {"A0", "update"},
		"the gate checks the claim":                            {"A0 A0", "assist"},
		"the gate checks the epoch":                            {"A0", "crash"},
		"the gate checks the nonce":                            {"A0", "pgback rdback", saved},
		"the gate checks the number":                           {"A0", "reply"},
		"the gate checks how far it has come":                  {"A0 A0", "rdback"},
		"the gate keeps doubt until the mark has moved":        {"A0 A0", "crash"},
		"the gate's count is noted":                            {"A0", "rdback"},
		"the gate's epoch is noted":                            {"A0+B1", "rdback crash"},
		"the mark never sees less than before":                 {"A0 B0 C0", "", open2},
		"the mark of a copy sees nothing of the server":        {"A0 A0", "copy"},
		"the mark sees nothing that its scan did not see":      {"A0 A0", ""},
		"the pass keeps its snapshot":                          {"A0 A0", ""},
		"the pass of a hand-over is written before it is used": {"A0? B0", "pgcrash", adopted},
		"the stream checks the mark":                           {"A0", ""},
		"the timeline is noted":                                {"A0", "pgback"},
		"unsettled ids become doubt":                           {"A0", "crash"},
		"events in the stream are in doubt":                    {"A0", "pgback"},
		"missing events are published again":                   {"A0", "flush"},
	} {
		m := newMachine(where[0], broken)
		m.prefix = where[2]
		n, wrong, _ := m.explore(parseBudget(where[1]), 2_000_000)
		if wrong == "" {
			t.Errorf("without %q nothing is found wrong in %d states of %q with %q", broken, n, where[0], where[1])
		} else if testing.Verbose() {
			t.Logf("without %q: %s, after %d states of %q with %q", broken, wrong, n, where[0], where[1])
		}
	}
}
