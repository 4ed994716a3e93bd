package cdc

import (
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// register registers the reader's metric. Slot gauges belong to the relay.
func (r *Reader) register(reg prometheus.Registerer) error {
	if reg == nil {
		return nil
	}
	if err := reg.Register(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "outbox_wire_idle_seconds",
		Help: "Seconds since anything was received over the replication connection; 0 without one. " +
			"Above half a minute the server is silent, or the sink holds the reader back.",
	}, r.wireIdle)); err != nil {
		return fmt.Errorf("register the reader's metric: %w", err)
	}
	return nil
}

// wireIdle returns the seconds since the server was last heard.
func (r *Reader) wireIdle() float64 {
	heard := r.heard.Load()
	if heard == 0 {
		return 0
	}
	return max(0, time.Since(time.Unix(0, heard)).Seconds())
}
