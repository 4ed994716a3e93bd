package cdc

import (
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are the reader's. Slot gauges belong to the relay.
type metrics struct {
	transactions, rows, reconnects, decodeErrors, bytes prometheus.Counter
}

func newMetrics(reg prometheus.Registerer, r *Reader) (*metrics, error) {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	m := &metrics{
		transactions: counter("outbox_cdc_transactions_total", "Transactions received from the replication slot."),
		rows: counter("outbox_cdc_rows_total",
			"Outbox rows received from the replication slot, repeated ones included."),
		reconnects: counter("outbox_cdc_reconnects_total",
			"Times the replication stream was started again. A steady rise means that the stream breaks."),
		decodeErrors: counter("outbox_cdc_decode_errors_total",
			"Messages of the stream that could not be decoded. Any rise means that the table does not have the "+
				"expected columns."),
		bytes: counter("outbox_cdc_received_bytes_total", "Bytes received over the replication connection."),
	}
	if reg == nil {
		return m, nil
	}
	idle := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "outbox_wire_idle_seconds",
		Help: "Seconds since anything was received over the replication connection; 0 without one. " +
			"Above half a minute the server is silent, or the sink holds the reader back.",
	}, r.wireIdle)
	for _, c := range []prometheus.Collector{m.transactions, m.rows, m.reconnects, m.decodeErrors, m.bytes, idle} {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("register the reader's metrics: %w", err)
		}
	}
	return m, nil
}

// wireIdle returns the seconds since the server was last heard.
func (r *Reader) wireIdle() float64 {
	heard := r.heard.Load()
	if heard == 0 {
		return 0
	}
	return max(0, time.Since(time.Unix(0, heard)).Seconds())
}
