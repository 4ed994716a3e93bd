package idem

import (
	"container/list"
	"sync"
	"time"
)

// A finished record never changes in its incarnation of the database, so a hot replay need not ask Redis.
const (
	cacheSize = 1000
	cacheTTL  = 5 * time.Second
)

// cache keeps the most recently replayed records.
type cache struct {
	size int
	ttl  time.Duration

	mu    sync.Mutex
	byKey map[Key]*list.Element
	// order has *cached, the most recently used first.
	order *list.List
}

type cached struct {
	key     Key
	fp      string
	rec     Record
	expires time.Time
}

func newCache(size int, ttl time.Duration) *cache {
	return &cache{size: size, ttl: ttl, byKey: make(map[Key]*list.Element), order: list.New()}
}

func (c *cache) get(k Key) (rec Record, fp string, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, ok := c.byKey[k]
	if !ok {
		return Record{}, "", false
	}
	v := e.Value.(*cached)
	if time.Now().After(v.expires) {
		c.remove(e)
		return Record{}, "", false
	}
	c.order.MoveToFront(e)
	return v.rec, v.fp, true
}

func (c *cache) put(k Key, fp string, rec Record) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e, ok := c.byKey[k]; ok {
		c.remove(e)
	}
	c.byKey[k] = c.order.PushFront(&cached{key: k, fp: fp, rec: rec, expires: time.Now().Add(c.ttl)})
	if c.order.Len() > c.size {
		c.remove(c.order.Back())
	}
}

func (c *cache) remove(e *list.Element) {
	c.order.Remove(e)
	delete(c.byKey, e.Value.(*cached).key)
}
