package main

import (
	"fmt"
	"math"
	"strings"
)

// chart is a drawing of lines over a logarithmic x axis.
type chart struct {
	title, x, y string
	logY        bool
	lines       []line
}

type line struct {
	name   string
	points []point
}

type point struct{ x, y float64 }

// colors and dashes tell lines apart, also in print and for the color-blind (Okabe and
// Ito, "Color Universal Design").
var (
	colors = []string{"#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#000000", "#999999"}
	dashes = []string{"", "8 4", "2 3", "10 3 2 3", "5 5", "1 5", "14 4", "3 8"}
)

const (
	width, height            = 760.0, 400.0
	left, right, top, bottom = 64.0, 250.0, 40.0, 48.0
)

// svg is the drawing, on a ground of its own: pages may be dark.
func (c chart) svg() string {
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %g %g" font-family="sans-serif" font-size="12" role="img" aria-label="%s">`+"\n", width, height, text(c.title))
	fmt.Fprintf(&b, `<rect width="%g" height="%g" fill="#fff"/><text x="%g" y="24" font-size="15" font-weight="bold">%s</text>`+"\n", width, height, left, text(c.title))
	minX, maxX, minY, maxY := c.bounds()
	px := func(x float64) float64 {
		return left + (math.Log10(x)-math.Log10(minX))/(math.Log10(maxX)-math.Log10(minX))*(width-left-right)
	}
	py := func(y float64) float64 {
		share := (y - minY) / (maxY - minY)
		if c.logY {
			share = (math.Log10(max(y, minY)) - math.Log10(minY)) / (math.Log10(maxY) - math.Log10(minY))
		}
		return height - bottom - share*(height-top-bottom)
	}
	for x := minX; x <= maxX*1.001; x *= 10 {
		fmt.Fprintf(&b, `<path d="M%.1f %g V%g" stroke="#ddd"/><text x="%.1f" y="%g" text-anchor="middle">%g</text>`+"\n", px(x), top, height-bottom, px(x), height-bottom+18, x)
	}
	for _, y := range c.ticks(minY, maxY) {
		fmt.Fprintf(&b, `<path d="M%g %.1f H%g" stroke="#ddd"/><text x="%g" y="%.1f" text-anchor="end">%g</text>`+"\n", left, py(y), width-right, left-6, py(y)+4, y)
	}
	fmt.Fprintf(&b, `<text x="%g" y="%g" text-anchor="middle">%s</text><text transform="translate(16 %g) rotate(-90)" text-anchor="middle">%s</text>`+"\n",
		(left+width-right)/2, height-10, text(c.x), (top+height-bottom)/2, text(c.y))
	for i, l := range c.lines {
		color, dash := colors[i%len(colors)], dashes[i%len(dashes)]
		var path []string
		for _, p := range l.points {
			path = append(path, fmt.Sprintf("%.1f,%.1f", px(p.x), py(p.y)))
			fmt.Fprintf(&b, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>`, px(p.x), py(p.y), color)
		}
		fmt.Fprintf(&b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="2" stroke-dasharray="%s"/>`+"\n", strings.Join(path, " "), color, dash)
		y := top + 20 + 22*float64(i)
		fmt.Fprintf(&b, `<path d="M%g %g h28" stroke="%s" stroke-width="2" stroke-dasharray="%s"/><text x="%g" y="%g">%s</text>`+"\n",
			width-right+16, y, color, dash, width-right+50, y+4, text(l.name))
	}
	b.WriteString("</svg>\n")
	return b.String()
}

// bounds are the corners: whole decades where the axis is logarithmic.
func (c chart) bounds() (minX, maxX, minY, maxY float64) {
	minX, minY = math.Inf(1), math.Inf(1)
	for _, l := range c.lines {
		for _, p := range l.points {
			minX, maxX = min(minX, p.x), max(maxX, p.x)
			minY, maxY = min(minY, p.y), max(maxY, p.y)
		}
	}
	minX, maxX = math.Pow(10, math.Floor(math.Log10(minX))), math.Pow(10, math.Ceil(math.Log10(maxX)))
	if c.logY {
		return minX, maxX, math.Pow(10, math.Floor(math.Log10(max(minY, 0.001)))), math.Pow(10, math.Ceil(math.Log10(maxY)))
	}
	return minX, maxX, 0, niceStep(maxY) * math.Ceil(maxY/niceStep(maxY))
}

func (c chart) ticks(minY, maxY float64) (all []float64) {
	if c.logY {
		for y := minY; y <= maxY*1.001; y *= 10 {
			all = append(all, y)
		}
		return all
	}
	for y := minY; y <= maxY*1.001; y += niceStep(maxY) {
		all = append(all, y)
	}
	return all
}

// niceStep is 1, 2 or 5 times a power of ten, of which four to ten make m.
func niceStep(m float64) float64 {
	power := math.Pow(10, math.Floor(math.Log10(m)))
	for _, f := range []float64{0.1, 0.2, 0.5, 1} {
		if m/(power*f) <= 10 {
			return power * f
		}
	}
	return power
}

// text is s inside of XML.
func text(s string) string {
	return strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", `"`, "&quot;").Replace(s)
}
