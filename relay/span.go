package relay

import "context"

// span is the two contexts of an orderly stop: while intake lasts, new work is taken; while work lasts, what was taken
// is finished. Work never ends before intake has, and neither ends without a cause.
type span struct{ intake, work context.Context }
