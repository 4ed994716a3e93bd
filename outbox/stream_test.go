package outbox

import "testing"

func TestStreamName(t *testing.T) {
	t.Parallel()
	for id, part := range map[string]int{"": 3, "a": 0} {
		_ = part
		t.Log(id, PartOf(id))
	}
}
