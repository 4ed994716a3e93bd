package consumer

import "time"

// If the handler's database is unreachable, nearly all events fail, and none of them must die of it.
//
// Successes since the first failure of an entry, and a few before it, show that the handler works. Entries of other
// subjects that have failed and not yet succeeded show that it does not. The more of them fail, the more successes each
// attempt of the entry needs. Without these, its attempts start again. If no other subject fails, each failure counts.

// failuresPerSuccess is how many failing entries one success outweighs.
const failuresPerSuccess = 9

// recentSuccesses is how many successes before the first failure of an entry count, so that a few bad events die also
// when they are the last ones.
const recentSuccesses = 3

// outageLogEvery is the least time between two log lines about an outage.
const outageLogEvery = time.Minute

// fail notes that a run of e has failed, and reports whether that is due to an outage.
func (qs *queues) fail(e *entry) bool {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	if !e.failed {
		e.failed, e.since = true, max(0, qs.succeeded-recentSuccesses)
		qs.failing++
		if qs.row++; qs.row > failuresPerSuccess {
			qs.before = qs.succeeded
		}
	}
	return qs.outage(e)
}

// outage reports whether e has failed because nearly all entries fail.
func (qs *queues) outage(e *entry) bool {
	return e.failed && failuresPerSuccess*(qs.succeeded-max(e.since, qs.before)) < int64((qs.failing-1)*e.attempt)
}

// settled notes that e is done, or belongs to another consumer.
func (qs *queues) settled(e *entry) {
	if e.failed {
		e.failed = false
		qs.failing--
	}
}

// logOutage logs, now and then, that failures do not count.
func (c *Consumer) logOutage(err error) {
	now, last := time.Now().UnixNano(), c.outageLogged.Load()
	if now-last >= outageLogEvery.Nanoseconds() && c.outageLogged.CompareAndSwap(last, now) {
		c.log.Warn("nearly all events fail: the failures do not count as attempts, and the events are retried",
			"err", err)
	}
}
