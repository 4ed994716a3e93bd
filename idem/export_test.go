package idem

import (
	"time"

	"github.com/redis/go-redis/v9"
)

// For tests that are not about time: on a busy machine a reply may take longer than the guard's timeout, and a guard
// without Redis admits every request.

const testTimeout = 20 * time.Second

// Patient makes a guard wait for its calls.
func Patient(g *Guard) *Guard {
	g.timeout = testTimeout
	return g
}

// PatientClient is NewClient with longer timeouts.
func PatientClient(url string) (redis.UniversalClient, error) {
	c, err := NewClient(url)
	if err != nil {
		return nil, err
	}
	o := *c.(*redis.Client).Options()
	_ = c.Close()
	o.Dialer = nil // it has the old timeout
	o.DialTimeout, o.ReadTimeout, o.WriteTimeout, o.PoolTimeout = testTimeout, testTimeout, testTimeout, testTimeout
	return redis.NewClient(&o), nil
}
