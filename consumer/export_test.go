package consumer

import "time"

// StallAfter sets after how long c counts as stalled.
func StallAfter(c *Consumer, d time.Duration) { c.dog.stall = d }
