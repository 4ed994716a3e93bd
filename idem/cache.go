package idem

import (
	"time"

	lru "github.com/hashicorp/golang-lru/v2"
)

// A finished record never changes in its incarnation of the database, so a hot replay need not ask Redis.
const (
	cacheSize = 1000
	cacheTTL  = 5 * time.Second
)

// cache keeps the most recently replayed records. (The library's expirable cache has a goroutine that never ends.)
type cache struct {
	ttl     time.Duration
	records *lru.Cache[Key, cached]
}

type cached struct {
	fp      string
	rec     Record
	expires time.Time
}

func newCache(size int, ttl time.Duration) *cache {
	records, err := lru.New[Key, cached](size)
	if err != nil {
		panic(err) // the size is not positive
	}
	return &cache{ttl, records}
}

func (c *cache) get(k Key) (rec Record, fp string, ok bool) {
	v, ok := c.records.Get(k)
	if !ok || time.Now().After(v.expires) {
		return Record{}, "", false
	}
	return v.rec, v.fp, true
}

func (c *cache) put(k Key, fp string, rec Record) {
	c.records.Add(k, cached{fp, rec, time.Now().Add(c.ttl)})
}
