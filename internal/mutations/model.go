package main

// modelled maps safeguards of the code to the safeguards of the exhaustive models: names of
// TestEverySafeguardOfTheMarkIsNeeded in internal/model, or of TestModel in idem.
var modelled = map[string]string{
	"a lost reply publishes once":                 "the gate checks the number",
	"batches are numbered":                        "the gate checks the number",
	"events in doubt are not published again":     "doubt stays until it is settled",
	"a claim inherits what the one before left":   "a claim inherits doubt",
	"an earlier claim is fenced":                  "the gate checks the claim",
	"a gate that went back in time is noticed":    "the gate checks how far it has come",
	"older owners are fenced":                     "the gate checks the epoch",
	"a lost gate is a gap":                        "a gate that is new is not whole",
	"adoption turns what is unsettled into doubt": "unsettled ids become doubt",
	"nothing is published to a restarted server":  "nothing is published before the stream is whole",
	"a mark is the owner's":                       "a mark's write checks the epoch",
	"marks move only forward":                     "the mark never sees less than before",
	"the mark of a part is its owner's":           "a mark's write checks the claim",
	"a claim is the owner's":                      "a mark's write checks the server",
	"a park is the owner's":                       "a park checks the epoch",
	"one order per key":                           "without the unique index",
	"streams are repaired before anything newer":  "nothing is published before the stream is whole",
	"events in the stream are not restored":       "events in the stream are in doubt",
	"a restart of Redis is noticed":               "the gate's count is noted",
	"a hand-over waits for older transactions":    "a new slot has a barrier",
	"a hand-over ends with a pass over the table": "all parts are drained before one mark is made",
	"a mark moves on evidence":                    "a transaction is done as a whole",
	"events that the stream missed are noticed":   "a missed row is noticed",
	"the slot moves without a gap":                "only what is settled is confirmed",
	"only what is contiguous is confirmed":        "only what is settled is confirmed",
}
