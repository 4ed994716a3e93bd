package consumer_test

import (
	"strings"
	"testing"

	"posthaste/consumer"
)

func TestOptionsAreChecked(t *testing.T) {
	t.Parallel()
	_, err := consumer.New(consumer.Options{Streams: []string{"a"}, Prefix: "b", Workers: -1})
	for _, want := range []string{
		"no Redis client", "no group", "no handler", "either streams or a prefix",
		"negative",
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v does not say %q", err, want)
		}
	}
}
